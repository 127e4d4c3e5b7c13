"""Memory of one of the trainer's GPUs: verl's FSDP2 engine with AdamW, as Forage configures it on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from forage_cli.planning.assumptions import Assumptions
from forage_cli.planning.parts import Memory, MemoryUse, format_gib
from forage_cli.planning.shapes import Shape
from forage_runtime.settings import AdvantageEstimator, Settings

HEAD_PASS, LAYER_PASS, STEP = "the backward pass of the output layer", "the backward pass of a layer", "AdamW's step"
"""Moments at which the trainer may hold most."""
_MASTER = 4  # bytes of a parameter, a gradient, and each of AdamW's two moments
_HEAD_CHUNK = 512
_CHUNK_COPIES = 7.0
"""fp32 tensors as large as a chunk's logits that verl's fused output layer holds in its backward pass."""
_WHOLE_COPIES = 2
"""Tensors as large as all logits that exist without the fused output layer: themselves and their gradient."""


@dataclass(frozen=True)
class Training:
    """What of the settings decides on the trainer's memory and time.

    Attributes:
        shards: processes that share one copy of the parameters.
        trained: number of parameters with gradients and moments.
        tokens: of the largest micro-batch.
        width: bytes of a number in forward and backward passes.
        defers_sync: whether gradients stay whole on each GPU until the last micro-batch of an update.
        holds_reference, streams_reference: whether a reference is on the GPUs, or read from the host in each pass; with
            LoRA neither, as the model without its adapter is the reference.
    """

    gpus: int
    shards: int
    trained: int
    adapter: int
    tokens: int
    width: int
    is_recomputed: bool
    is_fused: bool
    has_critic: bool
    holds_reference: bool
    streams_reference: bool
    is_offloaded: bool
    defers_sync: bool
    updates: int
    reads_old: bool


def describe_training(settings: Settings, shape: Shape) -> Training:
    """Read the settings as the trainer does on a GPU."""
    trainer, engine = settings.trainer, settings.trainer.engine
    gpus = trainer.nnodes * trainer.n_gpus_per_node
    rank = trainer.lora.lora_rank
    adapter = shape.count_adapter_parameters(rank) if rank else 0
    has_reference = (trainer.actor.use_kl_loss or trainer.algorithm.use_kl_in_reward) and not rank
    is_streamed = trainer.ref.param_offload or engine.offload_policy
    updates = trainer.actor.ppo_epochs * -(-settings.data.train_batch_size // trainer.actor.ppo_mini_batch_size)
    return Training(
        gpus=gpus,
        shards=gpus if engine.fsdp_size < 0 else min(engine.fsdp_size, gpus),
        trained=adapter or shape.parameters,
        adapter=adapter,
        tokens=trainer.actor.ppo_max_token_len_per_gpu,
        width=4 if engine.param_dtype == "fp32" else 2,
        is_recomputed=engine.enable_gradient_checkpointing is not False,
        is_fused=engine.use_fused_kernels is not False,
        has_critic=trainer.algorithm.adv_estimator is AdvantageEstimator.GAE,
        holds_reference=has_reference and not is_streamed,
        streams_reference=has_reference and is_streamed,
        is_offloaded=engine.offload_policy,
        defers_sync=bool(engine.args.get("use_no_sync_for_gradient_accumulation")),
        updates=updates,
        reads_old=updates > 1,
    )


def estimate_trainer(settings: Settings, shape: Shape, limit: int, assumed: Assumptions, beside: int = 0) -> Memory:
    """The memory of one of its GPUs at the moment at which it needs most.

    Args:
        beside: bytes that another process keeps on the same GPU meanwhile.
    """
    training = describe_training(settings, shape)
    moments = list_moments(training, shape)
    moment, transient = max(moments.items(), key=lambda one: sum(part.size for part in one[1]))
    parts = [*list_resident(training, shape), *transient]
    lost = int(assumed.fragmentation * sum(part.size for part in parts))
    parts.append(MemoryUse("fragmentation", lost, f"{assumed.fragmentation:.0%} of the above (assumed)"))
    parts.append(MemoryUse("CUDA and NCCL", assumed.context + assumed.workspaces, "assumed"))
    if beside:
        parts.append(MemoryUse("sleeping engine", beside, "what vLLM keeps (assumed)"))
    return Memory("trainer", training.gpus, moment, tuple(part for part in parts if part.size), limit)


def list_moments(training: Training, shape: Shape) -> dict[str, list[MemoryUse]]:
    """What is held at each moment of an update besides what is held at all of them."""
    moments = {
        HEAD_PASS: _list_head_pass(training, shape),
        LAYER_PASS: _list_layer_pass(training, shape, training.tokens, "actor"),
        STEP: _list_optimizer_step(training),
    }
    if training.has_critic:
        moments["the critic's backward pass"] = _list_layer_pass(training, shape, training.tokens, "critic")
    return moments


def count_offloaded(training: Training, shape: Shape) -> int:
    """Bytes of parameters and moments of a process, which move where they are offloaded; gradients are gone by then."""
    state = _MASTER * (shape.parameters + training.adapter) + 2 * _MASTER * training.trained
    if training.has_critic:
        state += 3 * _MASTER * count_critic_parameters(shape)
    reference = training.width * shape.parameters if training.holds_reference else 0
    return (state + reference) // training.shards


def count_gradients(training: Training, shape: Shape) -> int:
    """Bytes of gradients of a process."""
    critic = count_critic_parameters(shape) if training.has_critic else 0
    return _MASTER * (training.trained + critic) // training.shards


def list_resident(training: Training, shape: Shape) -> list[MemoryUse]:
    """What is held during a whole update, from its second micro-batch on."""
    if training.is_offloaded:
        return []
    deferred = _MASTER * training.trained if training.defers_sync else 0
    shards = f"over {training.shards} GPU(s)"
    weights = _MASTER * (shape.parameters + training.adapter) // training.shards
    trained = _MASTER * training.trained // training.shards
    parts = [
        MemoryUse("weights", weights, f"fp32, {shards}"),
        MemoryUse("gradients", trained, f"fp32, {shards}"),
        MemoryUse("optimizer", 2 * trained, f"AdamW's two moments in fp32, {shards}"),
        MemoryUse("deferred gradients", deferred, "fp32, on every GPU (use_no_sync_for_gradient_accumulation)"),
    ]
    if training.holds_reference:
        reference = training.width * shape.parameters // training.shards
        parts.append(MemoryUse("reference", reference, f"{8 * training.width} bits, {shards}"))
    if training.has_critic:
        critic = 4 * _MASTER * count_critic_parameters(shape) // training.shards
        parts.append(MemoryUse("critic", critic, f"its weights, gradients and optimizer, {shards}"))
    return parts


def count_critic_parameters(shape: Shape) -> int:
    """Of a value model: a policy with a head of one output."""
    return shape.layers * shape.layer_parameters + shape.head_parameters + 2 * shape.hidden


def _list_head_pass(training: Training, shape: Shape) -> list[MemoryUse]:
    head, width = shape.head_parameters, training.width
    is_trained = not training.adapter
    # Gathered once for the pass; its gradient, and that in fp32 on the way to the other processes.
    whole = head * (width + (width + _MASTER if is_trained else 0))
    return [
        _describe_inputs(training, shape, training.tokens),
        _describe_logits(training, shape),
        MemoryUse("gathered layers", whole, "the output layer and its gradient, not sharded"),
    ]


def _list_layer_pass(training: Training, shape: Shape, tokens: int, model: str) -> list[MemoryUse]:
    width, layer = training.width, shape.layer_parameters
    is_trained = model == "critic" or not training.adapter
    # Two layers are gathered at once; gradients of one are summed in fp32.
    gathered = layer * (2 * width + (width + _MASTER if is_trained else 0))
    if shape.is_tied:
        # It belongs to the root of FSDP's groups, which stay gathered until the end of the backward pass.
        gathered += shape.head_parameters * (width + (width if is_trained else 0))
    saved = [_describe_inputs(training, shape, tokens)] if training.is_recomputed else []
    layers = 1 if training.is_recomputed else shape.layers
    activations = layers * _count_activations(shape, width) * tokens
    gradients = _count_activation_gradients(shape, width) * tokens
    why = "of one layer, computed again" if training.is_recomputed else f"of {layers} layers"
    return [
        *saved,
        MemoryUse("activations", activations + gradients, f"{why}, {tokens} tokens, and their gradients"),
        MemoryUse("gathered layers", gathered, "two layers and the gradient of one, not sharded"),
    ]


def _list_optimizer_step(training: Training) -> list[MemoryUse]:
    if training.is_offloaded:
        return []
    return [
        MemoryUse("optimizer's buffers", _MASTER * training.trained // training.shards, "AdamW's, of all parameters")
    ]


def _describe_inputs(training: Training, shape: Shape, tokens: int) -> MemoryUse:
    if training.is_recomputed:
        return MemoryUse("layer inputs", shape.layers * tokens * shape.hidden * training.width, f"{tokens} tokens")
    size = shape.layers * _count_activations(shape, training.width) * tokens
    return MemoryUse("activations", size, f"of {shape.layers} layers, {tokens} tokens")


def _describe_logits(training: Training, shape: Shape) -> MemoryUse:
    vocabulary = shape.vocabulary
    chunk = int(_CHUNK_COPIES * 4 * vocabulary * min(_HEAD_CHUNK, training.tokens))
    if training.is_fused:
        # The kernel computes a chunk's part of the output layer's gradient, needed or not.
        chunk += training.width * shape.head_parameters
        return MemoryUse("logits", chunk, f"fp32, {_HEAD_CHUNK} tokens at a time, vocabulary {vocabulary}")
    whole = _WHOLE_COPIES * training.width * vocabulary * training.tokens
    why = f"of {training.tokens} tokens and their gradients, vocabulary {vocabulary}: {format_gib(whole)}; fp32 chunks"
    return MemoryUse("logits", whole + chunk, why)


def _count_activations(shape: Shape, width: int) -> int:
    """Bytes of a token that one layer saves for its backward pass, with attention that saves no scores."""
    # Transformers' RMSNorm computes in fp32.
    normed = shape.norms * shape.hidden + (shape.query_width + shape.kv_width if shape.has_head_norms else 0)
    norms = (4 + 2 * width) * normed
    attention = width * (4 * shape.query_width + 5 * shape.kv_width + shape.hidden)
    return norms + attention + width * 4 * shape.intermediate


def _count_activation_gradients(shape: Shape, width: int) -> int:
    """Bytes of a token for gradients between the parts of a layer, at the MLP, where they are largest."""
    return width * (3 * shape.intermediate // 2 + shape.hidden)
