"""verl's FSDP2 engines on a CPU.

They differ from those on GPUs in how a batch is cut. Rows are sorted by length and cut into micro-batches that fit a
CPU's caches. Where rows share enough of their first tokens, micro-batches have whole groups, and each shared token is
computed once.
"""

from __future__ import annotations

import forage_trainer.engine.verl_cpu  # noqa: F401  (verl's workers look up the platform when they are imported)

# isort: split
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.fsdp import FSDPModule
from verl.utils import tensordict_utils as tu
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.engine.utils import postprocess_batch_func

from forage_runtime.telemetry.logs import get_logger
from forage_trainer.data.prefix_tree import count_tokens, cut_trees
from forage_trainer.data.tensors import make_jagged, pad_jagged, split_rows
from forage_trainer.engine.attention import PREFIX_TREE, VARLEN
from forage_trainer.engine.engine_state import reshard
from forage_trainer.engine.layout import join_rows
from forage_trainer.engine.scoring import SHARED_SHARE, SHARES, ScoringEngine, ValueEngine
from forage_trainer.weights.checkpoint_tensors import get_base

CACHE_TOKENS = 2048
"""Padded tokens of a micro-batch. On one core 1k is 15 % slower and 16k a fifth slower; 2k to 4k are equal."""
_UNUSED = ("position_ids", "loss_mask")
"""Fields of a micro-batch that these engines do not need: positions are recomputed, the loss reads `response_mask`."""
_LENGTHS = ("prompts", "responses")
"""Fields that stay jagged: verl's losses read the lengths of rows from them."""
_MOST_LEFT = 0.95
"""Share of the rows' tokens that a tree may have: with more it saves less than attention row by row costs."""
_ATTENTIONS = ("sdpa", VARLEN)
"""Attention implementations that the attention of a tree may replace: they compute the same in PyTorch's attention."""
_NO_LAYER = "no class of layers"
"""A class name that no layer has: verl then wraps the model as a whole and no layer."""


def cut_micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Sort row numbers by length; cut them so that rows x longest row stays within `budget`. A longer row is alone."""
    cuts: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if cuts and (len(cuts[-1]) + 1) * lengths[row] <= budget:
            cuts[-1].append(row)
        else:
            cuts.append([row])
    return cuts


def split_cuts(cuts: Sequence[list[int]], at_least: int) -> list[list[int]]:
    """Split cuts of row numbers in halves, the largest first, until there are so many, which is at most one a row."""
    cuts = [*cuts]
    while len(cuts) < at_least:
        most = max(range(len(cuts)), key=lambda cut: len(cuts[cut]))
        rows, half = cuts[most], len(cuts[most]) // 2
        cuts[most : most + 1] = [rows[:half], rows[half:]]
    return cuts


class _MicroBatchSelector:
    """Selects micro-batches of one batch, whose jagged tensors it pads once, as that is faster than for each one."""

    def __init__(self, data: TensorDict) -> None:
        every = {name: value for name, value in data.items() if isinstance(value, torch.Tensor)}
        self._shared = TensorDict(dict(data.exclude(*every).items()), batch_size=[], device="cpu")
        self._rows = {name: split_rows(every.pop(name)) for name in _LENGTHS}
        self._lengths = {name: value.offsets().diff() for name, value in every.items() if value.is_nested}
        self._padded = {name: pad_jagged(value) for name, value in every.items()}

    def __call__(self, rows: Sequence[int]) -> TensorDict:
        """Select the given rows, padded to the longest of them."""
        micro, index = self._shared.copy(), torch.tensor(rows)
        for name, value in self._padded.items():
            selected = value[index]
            micro[name] = selected[:, : self._lengths[name][index].max()] if name in self._lengths else selected
        for name, parts in self._rows.items():
            micro[name] = make_jagged([parts[row] for row in rows])
        return micro


class _CpuEngineBase(FSDPEngine):  # type: ignore[misc, unused-ignore]
    """The common part of both engines; every process must have equally many rows."""

    _shares_prefixes: bool = False

    def initialize(self) -> None:
        """Build model and optimizer; measure whether rows may be computed as a tree of their prefixes."""
        super().initialize()
        attention = get_base(self.module).config._attn_implementation
        problem = self.find_tree_problem() if attention in _ATTENTIONS else f"its attention is {attention}"
        reshard(self.module)
        self._shares_prefixes = problem is None
        if problem is not None and dist.get_rank() == 0:
            kind = self.model_config.hf_config.model_type
            get_logger().info("shared_tokens_are_repeated", reason=problem, model=kind)

    def _build_fsdp_module(self, module: Any) -> Any:
        if self.get_data_parallel_size() == 1:
            # One process has nothing to gather layer by layer: one unit for the whole model runs its hooks once a pass.
            self.engine_config.wrap_policy.update(disable=True, transformer_layer_cls_to_wrap=[_NO_LAYER])
        return super()._build_fsdp_module(module)

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """Do as verl's engine, over micro-batches of similar lengths."""
        group = self.get_data_parallel_group()
        keep_output = forward_only or tu.get_non_tensor_data(data, "return_model_output", False)
        tokens = data["loss_mask"].values().sum()
        dist.all_reduce(tokens, group=group)
        size = self.get_data_parallel_size()
        tu.assign_non_tensor(data, batch_num_tokens=tokens.item(), dp_size=size, use_dynamic_bsz=True)
        lengths = data["input_ids"].offsets().diff().tolist()
        budget = min(CACHE_TOKENS, data["max_token_len_per_gpu"])
        cuts, shared = cut_micro_batches(lengths, budget), 0.0
        if self._shares_prefixes:
            ids, prompts = join_rows(data), data["prompts"].offsets().diff().tolist()
            groups = cut_trees(ids, prompts, budget, data["max_token_len_per_gpu"])
            left = sum(count_tokens([ids[row] for row in rows]) for rows in groups)
            if left <= _MOST_LEFT * sum(lengths):
                cuts, shared = groups, 1 - left / sum(lengths)
        # A forward pass gathers parameters from every process, so all of them must make equally many.
        most = torch.tensor(len(cuts))
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        rows = split_cuts(cuts, int(most))
        outputs = []
        select = _MicroBatchSelector(data.exclude(*_UNUSED))
        with self._gather_parameters(), self._attend_along_trees(shared > 0):
            for number, micro_rows in enumerate(rows):
                micro = select(micro_rows)
                tu.assign_non_tensor(micro, **{SHARES: shared > 0})
                is_last = number == len(rows) - 1
                with torch.set_grad_enabled(not forward_only), self._gradient_sync_context(is_last_micro_batch=is_last):
                    loss, output = self.forward_step(micro, loss_function=loss_function, forward_only=forward_only)
                    if not forward_only:
                        loss.backward()
                if not keep_output:
                    output.pop("model_output", None)
                outputs.append(output)
        result = postprocess_batch_func(outputs, rows, data)
        if not forward_only:
            result["metrics"][SHARED_SHARE] = [shared]
        return result

    @contextmanager
    def _attend_along_trees(self, shares: bool) -> Iterator[None]:
        """Let the model attend along trees in the block, if its rows are some."""
        if not shares:
            yield
            return
        model = get_base(self.module)
        own = model.config._attn_implementation
        model.set_attn_implementation(PREFIX_TREE)
        try:
            yield
        finally:
            model.set_attn_implementation(own)

    @contextmanager
    def _gather_parameters(self) -> Iterator[None]:
        """Gather parameters once for all micro-batches, unless the settings prefer to save the memory."""
        if self.engine_config.reshard_after_forward and self.get_data_parallel_size() > 1:
            yield
            return
        self.module.set_reshard_after_forward(False)
        self.module.set_reshard_after_backward(False)
        try:
            yield
        finally:
            # The gathered copies are outdated once the optimizer has taken its step.
            for part in self.module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")  # type: ignore[untyped-decorator, unused-ignore]
class CpuEngine(_CpuEngineBase, ScoringEngine):  # type: ignore[misc, unused-ignore]
    """The engine of language models: log-probabilities and entropies."""


@EngineRegistry.register(model_type="value_model", backend="fsdp2", device="cpu")  # type: ignore[untyped-decorator, unused-ignore]
class CpuValueEngine(_CpuEngineBase, ValueEngine):  # type: ignore[misc, unused-ignore]
    """The engine of value models."""
