"""The memory of one update, measured with fake tensors: PyTorch runs every operation on shapes and tracks their bytes.

FSDP2 is PyTorch's own, in a process group without other members. Tensors lie on a fake CPU, since a build of PyTorch
without CUDA has no fake GPU; attention is PyTorch's variable-length kernel's fake, which keeps what the kernel keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PreTrainedConfig

from forage_trainer.engine import attention
from forage_trainer.engine.head import FusedHead, Question

LOGITS_KEPT, FUSED, NOTHING = "logits kept", "fused", "nothing"
"""What follows the last layer: verl's computation of all logits, with entropy gradients; `FusedHead`; or no head."""
_ROWS = 16
_CPU = torch.device("cpu")
_OPTIMIZER_BYTES = 8
"""AdamW's two moments of a parameter, fp32"""


@dataclass(frozen=True)
class Memory:
    """Bytes of one process.

    weights: sharded fp32 parameters. gradients: sharded, fp32. optimizer: AdamW's moments, computed: 8 a parameter.
    unsharded: gathered bf16 parameters, with the buffers of gathering them.
    unsharded_gradients: those of layers in work.
    activations: everything else that a forward and backward pass holds. These three are at the peak of a pass without
        an output layer.
    logits: peak of the output layer's forward and backward pass alone.
    backward: peak of the forward and backward pass, measured as a whole, and the optimizer's moments.
    step: peak of the optimizer's step, measured over parameters of the same size.
    """

    weights: int
    gradients: int
    optimizer: int
    unsharded: int
    unsharded_gradients: int
    activations: int
    logits: int
    backward: int
    step: int

    @property
    def peak(self) -> int:
        return max(self.backward, self.step)


def measure_update(config: PreTrainedConfig, tokens: int, processes: int, head: str, micro_batches: int = 1) -> Memory:
    """Measure an update of so many micro-batches of packed rows, as the trainer takes it on a GPU.

    Args:
        tokens: of a micro-batch.
        processes: that share parameters, gradients and optimizer state; activations are of one process.
        head: LOGITS_KEPT or FUSED.
        micro_batches: 1 or 2; from 2 on, the sharded gradients of those before are held. (With verl's
            `use_no_sync_for_gradient_accumulation`, which the trainer does not use, they would not be sharded.)
    """
    whole = _track_passes(config, tokens, processes, head, micro_batches)
    bare = _track_passes(config, tokens, processes, NOTHING, micro_batches)
    parameters = whole.sharded_parameters
    optimizer = _OPTIMIZER_BYTES * parameters
    parts = bare.categories
    return Memory(
        weights=4 * parameters,
        gradients=4 * parameters,
        optimizer=optimizer,
        unsharded=parts["Unsharded Param"] + parts["All Gather"],
        unsharded_gradients=parts["Unsharded Grad"] + parts["Reduce Scatter"],
        activations=parts["Activation"] + parts["Temp"] + parts["Inputs"],
        logits=_track_head(config, tokens, head),
        backward=whole.peak + optimizer,
        step=_track_step(parameters),
    )


@dataclass(frozen=True)
class _Passes:
    peak: int
    categories: dict[str, int]
    sharded_parameters: int


def _track_passes(config: PreTrainedConfig, tokens: int, processes: int, head: str, micro_batches: int) -> _Passes:
    """Track micro-batches of an update that is not the first: sharded gradients exist already at the end."""
    with _alone_in_group(processes) as mesh, FakeTensorMode(), _fake_kernel():
        model = AutoModelForCausalLM.from_config(config)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        compute = _build_head(model, head)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": True}
        embeddings = [] if config.tie_word_embeddings else [model.get_input_embeddings()]
        for part in [*embeddings, *model.model.layers]:
            fully_shard(part, **options)
        fully_shard(model, **options)
        tracker = FSDPMemTracker(model)
        inputs = _build_inputs(tokens)
        with tracker:
            for _ in range(micro_batches):
                compute(inputs).backward()
                tracker.reset_mod_stats()
        snapshot = tracker.get_tracker_snapshot("peak")[_CPU]
        sharded = sum(parameter.to_local().numel() for parameter in model.parameters())
    categories = {getattr(name, "value", name): value for name, value in snapshot.items()}
    return _Passes(categories.pop("Total"), categories, sharded)


def _build_head(model: Any, head: str) -> Callable[[dict[str, Any]], torch.Tensor]:
    """Build the function from a model's inputs to a loss."""
    if head == NOTHING:
        model.lm_head.forward = lambda hidden: hidden  # as large as what the last layer gave
        return lambda inputs: model(**inputs).logits.sum()
    if head == LOGITS_KEPT:
        return lambda inputs: _score_as_verl(model(**inputs).logits.squeeze(0), inputs["input_ids"][0])
    fused = FusedHead.adopt(model)

    def compute(inputs: dict[str, Any]) -> torch.Tensor:
        fused.question = _ask(inputs["input_ids"][0])
        log_probs: torch.Tensor = model(**inputs).logits[..., 0]
        return log_probs.sum()

    return compute


def _score_as_verl(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probabilities and entropies with gradients, as verl's engine without flash_attn and compilation.

    Types are those that autocast gives on a GPU. verl takes log-probabilities token by token, which keeps the same
    bytes as all at once.
    """
    probabilities = logits.softmax(-1, dtype=torch.float32)
    entropy = logits.logsumexp(-1) - (probabilities * logits).sum(-1)
    log_probs = logits.log_softmax(-1, dtype=torch.float32).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return log_probs.sum() - 0.0 * entropy.sum()


def _track_head(config: PreTrainedConfig, tokens: int, head: str) -> int:
    """Peak of the output layer's forward and backward pass, without its input and weights and their gradients."""
    with FakeTensorMode():
        hidden = torch.empty(1, tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        layer = FusedHead(config.hidden_size, config.vocab_size, bias=False, dtype=torch.bfloat16)
        labels = torch.zeros(tokens, dtype=torch.long)
        tracker = MemTracker()
        tracker.track_external(layer, hidden, labels)
        with tracker:
            if head == FUSED:
                layer.question = _ask(labels)
                layer(hidden)[..., 0].sum().backward()
            else:
                _score_as_verl(layer(hidden).squeeze(0), labels).backward()
        held = 2 * 2 * (layer.weight.numel() + hidden.numel()) + 8 * tokens
        return int(tracker.get_tracker_snapshot("peak")[_CPU]["Total"]) - held


def _track_step(parameters: int) -> int:
    """Peak of AdamW's step over so many parameters, with their gradients."""
    with FakeTensorMode():
        # In several tensors, as PyTorch treats all of them at once.
        weights = [torch.nn.Parameter(torch.empty(parameters // _ROWS)) for _ in range(_ROWS)]
        optimizer = torch.optim.AdamW(weights, foreach=True)
        tracker = MemTracker()
        tracker.track_external(*weights)
        with tracker:
            for weight in weights:
                weight.grad = torch.zeros_like(weight)
            optimizer.step()
        return int(tracker.get_tracker_snapshot("peak")[_CPU]["Total"])


def _ask(labels: torch.Tensor) -> Question:
    return Question(labels, 1.0, chosen=None, entropy=True, entropy_gradient=False)


def _build_inputs(tokens: int) -> dict[str, Any]:
    ids = torch.zeros(1, tokens, dtype=torch.long)
    bounds = torch.zeros(_ROWS + 1, dtype=torch.int32)
    longest = tokens // _ROWS
    rows = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    return {"input_ids": ids, "position_ids": ids.clone(), "attention_mask": None, "use_cache": False} | rows


@contextmanager
def _alone_in_group(processes: int) -> Iterator[Any]:
    dist.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (processes,))
    finally:
        dist.destroy_process_group()


@contextmanager
def _fake_kernel() -> Iterator[None]:
    """Take the kernel of GPUs; its fake runs on any device."""
    original = attention.has_kernel
    attention.register_varlen()
    attention.has_kernel = lambda _: True
    try:
        yield
    finally:
        attention.has_kernel = original
