"""Memory of one of the engines' GPUs: vLLM with a budget of `gpu_memory_utilization`, and what its KV cache holds."""

from __future__ import annotations

from dataclasses import dataclass

from forage_cli.planning.assumptions import Assumptions
from forage_cli.planning.parts import Memory, MemoryUse
from forage_cli.planning.shapes import Shape
from forage_cli.planning.work import Work
from forage_runtime.errors import UserError
from forage_runtime.settings import Settings

_BATCHED_TOKENS = 2048
"""vLLM's max_num_batched_tokens where nobody sets it."""
_SAMPLER_COPIES = 5
"""fp32 tensors as large as the logits of all sequences: logits, log-probabilities, probabilities, noise, and a copy."""


@dataclass(frozen=True)
class Rollout:
    """The engines' GPUs.

    Attributes:
        kv_tokens: that the KV cache of an engine holds.
        concurrency: sequences of the mean length that it holds, at most `max_num_seqs`.
        full_length: sequences of `max_model_len` that it holds.
    """

    memory: Memory
    engines: int
    tensor_parallel: int
    kv_tokens: int
    concurrency: int
    full_length: int
    max_num_seqs: int

    @property
    def fits(self) -> bool:
        """Whether there is room for at least one sequence of `max_model_len`, without which vLLM does not start."""
        return self.memory.fits and self.full_length >= 1


def estimate_rollout(
    settings: Settings, shape: Shape, limit: int, work: Work, assumed: Assumptions, beside: int = 0
) -> Rollout:
    """The memory of one of their GPUs.

    Args:
        beside: bytes that another process keeps on the same GPU meanwhile.
    """
    engine = settings.rollout.engine
    size = engine.tensor_parallel_size
    width = 4 if engine.dtype in ("float", "float32") else 2
    stored = 1 if engine.args.get("quantization") == "fp8" else width
    cached = 1 if str(engine.args.get("kv_cache_dtype", "auto")).startswith("fp8") else width
    batched = _read_batched_tokens(engine.args.get("max_num_batched_tokens"))
    budget = int(engine.gpu_memory_utilization * limit)
    parts = [
        MemoryUse("weights", stored * shape.parameters // size, f"{8 * stored} bits, over {size} GPU(s)"),
        MemoryUse("activations", batched * _count_activations(shape, width, size), f"{batched} tokens at a time"),
        MemoryUse(
            "sampler",
            _SAMPLER_COPIES * 4 * shape.vocabulary * engine.max_num_seqs,
            f"logits of {engine.max_num_seqs} sequences",
        ),
        MemoryUse("NCCL and cuBLAS", assumed.workspaces, "assumed"),
    ]
    if engine.args.get("enforce_eager") is not True:
        parts.append(MemoryUse("CUDA graphs", assumed.graphs, "assumed"))
    if engine.max_lora_rank:
        adapter = width * shape.count_adapter_parameters(engine.max_lora_rank) // size
        parts.append(MemoryUse("adapter", 2 * adapter, f"two of rank {engine.max_lora_rank}"))
    rest = budget - sum(part.size for part in parts)
    per_token = shape.count_kv_bytes(cached, size)
    tokens = max(0, rest) // per_token
    why = f"{tokens} tokens of {per_token / 1024:.0f} KiB: what gpu_memory_utilization leaves"
    parts.append(MemoryUse("KV cache", max(0, rest), why))
    parts.append(MemoryUse("CUDA", assumed.context, "assumed, outside of the budget"))
    if beside:
        parts.append(MemoryUse("idle trainer", beside, "what CUDA and NCCL keep of it (assumed)"))
    context = min(work.length, engine.max_model_len)
    engines = settings.rollout.engine_replicas.min
    return Rollout(
        Memory("rollout", engines * size, "sampling", tuple(parts), limit),
        engines=engines,
        tensor_parallel=size,
        kv_tokens=tokens,
        concurrency=max(0, min(engine.max_num_seqs, int(tokens // max(1.0, context)))),
        full_length=tokens // engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
    )


def _read_batched_tokens(value: object) -> int:
    if value is None:
        return _BATCHED_TOKENS
    if not isinstance(value, int) or value < 1:
        raise UserError(
            f"rollout.engine.args.max_num_batched_tokens is {value!r}: expected a whole number of at least 1"
        )
    return value


def _count_activations(shape: Shape, width: int, size: int) -> int:
    """Bytes of a token in the largest layer while prompts are read."""
    return width * (3 * shape.intermediate // size + 6 * shape.hidden)
