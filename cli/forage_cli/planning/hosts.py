"""Memory of the machines: the retriever's index, the trainer's processes, and Redis."""

from __future__ import annotations

from forage_cli.planning.parts import MemoryUse
from forage_cli.planning.retrieval.corpus import describe_corpus, read_manifest
from forage_cli.planning.retrieval.cost import estimate_vector_bytes, read_width
from forage_cli.planning.shapes import Shape
from forage_cli.planning.streams import estimate_stream_memory, format_bytes
from forage_cli.planning.trainer_memory import Training, count_gradients, count_offloaded
from forage_runtime.errors import UserError
from forage_runtime.settings import RetrievalMode, Settings

_FP32 = 4


def list_host_parts(settings: Settings, shape: Shape, training: Training, passages: int | None) -> list[MemoryUse]:
    """What services need of their machine's memory; a part that nothing is known about is left out.

    Args:
        passages: of the corpus; None: those of the index, if it is here.
    """
    parts = [_describe_redis(settings), *_list_trainer(settings, shape, training)]
    index = _describe_index(settings, passages)
    return parts if index is None else [index, *parts]


def _describe_redis(settings: Settings) -> MemoryUse:
    memory = estimate_stream_memory(settings)
    why = f"groups of training up to {format_bytes(memory.training)}, of a validation {format_bytes(memory.validation)}"
    return MemoryUse("Redis", memory.maxmemory, why)


def _list_trainer(settings: Settings, shape: Shape, training: Training) -> list[MemoryUse]:
    """Of one node: what its processes hold at the start, and what they offload."""
    own = settings.trainer.n_gpus_per_node
    # verl reads tied models in each process, others in the first alone.
    readers = own if shape.is_tied else 1
    parts = [MemoryUse("trainer's start", readers * _FP32 * shape.parameters, f"fp32 weights in {readers} process(es)")]
    engine = settings.trainer.engine
    is_colocated = settings.trainer.placement == "colocated"
    if is_colocated or engine.param_offload or engine.optimizer_offload or engine.offload_policy:
        held = own * count_offloaded(training, shape)
        if training.is_offloaded:  # AdamW computes there then, and so gradients are there
            held += own * count_gradients(training, shape)
        parts.append(MemoryUse("offloaded", held, f"by {own} process(es)"))
    if training.streams_reference:
        reference = own * training.width * shape.parameters // training.shards
        parts.append(MemoryUse("reference", reference, f"read from the host by {own} process(es)"))
    if is_colocated:
        engines = settings.rollout.engine_replicas.min
        parts.append(MemoryUse("sleeping engines", 2 * engines * shape.parameters, f"weights of {engines}, 16 bits"))
    return parts


def _describe_index(settings: Settings, passages: int | None) -> MemoryUse | None:
    """The index of one replica; of one shard where the corpus is cut."""
    retriever = settings.retriever
    manifest = read_manifest(retriever.index)
    if manifest is not None and passages is None:
        try:
            size = sum(int(entry["bytes"]) for entry in manifest["files"].values())
            held = f"{manifest['passages']} passages"
        except (LookupError, TypeError, ValueError, AttributeError):
            raise UserError(f"{retriever.index}/manifest.json is not that of an index: build it again") from None
        return MemoryUse("retriever", size, f"the files of {retriever.index}, {held}; page cache")
    corpus = describe_corpus(settings, passages)
    if corpus.passages is None or retriever.mode is RetrievalMode.BM25:
        return None
    width = read_width(retriever.encoder.model)
    held_bytes = estimate_vector_bytes(corpus.factory, width)
    if held_bytes is None:
        why = (
            f"{corpus.passages} vectors of {width} numbers as Flat, an upper bound ('forage index inspect' knows more)"
        )
        return MemoryUse("retriever", _FP32 * width * corpus.passages, why)
    return MemoryUse(
        "retriever", held_bytes * corpus.passages, f"{corpus.passages} vectors as {corpus.factory}; page cache"
    )
