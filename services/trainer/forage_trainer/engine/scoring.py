"""What Forage's engines compute with a model, on every device.

They differ from verl's in the layout of rows (see `layout`) and in what they take from the output layer (see `head`):
log-probabilities and entropies of response tokens alone, never with all logits of a micro-batch at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from tensordict import TensorDict
from torch.optim.lr_scheduler import LambdaLR
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead

from forage_runtime.errors import UserError
from forage_runtime.telemetry.logs import get_logger
from forage_trainer.data.tensors import split_rows
from forage_trainer.engine.attention import PREFIX_TREE, register_attentions
from forage_trainer.engine.engine_state import reshard
from forage_trainer.engine.head import FusedHead, HeadQuery, find_obstacle, score_logits
from forage_trainer.engine.layout import Layout, TreeLayout
from forage_trainer.engine.packing import (
    Compute,
    agree,
    build_probe,
    build_tree_probe,
    draw_forked_rows,
    draw_rows,
    measure_packing,
)
from forage_trainer.weights.checkpoint_tensors import get_base

register_attentions()


SHARES = "shares_prefixes"
"""Field of a micro-batch that is set where its rows are a tree."""
SHARED_SHARE = "shared_share"
"""Name of an update's metric: the share of its rows' tokens that are not computed, since rows share them."""
_CHANCE = 0.01
"""Standard deviations by which outputs may differ between two passes of one input that draw nothing at random."""
_REFUSALS = (AttributeError, ImportError, KeyError, NotImplementedError, TypeError, ValueError)
"""What transformers and verl raise of a model that they do not support."""


@contextmanager
def _count_heads(config: Any) -> Iterator[None]:
    """Let a model without attention, such as Mamba 2, have heads in the block: verl 0.9.1 reads their number to see
    whether sequences can be divided over processes, which Forage does not do."""
    missing = [name for name in ("num_attention_heads", "num_key_value_heads") if not hasattr(config, name)]
    for name in missing:
        setattr(config, name, 1)
    try:
        yield
    finally:
        for name in missing:
            delattr(config, name)


class _Engine(FSDPEngine):  # type: ignore[misc, unused-ignore]
    """What both kinds of engines change in how verl builds a model and its optimizer."""

    use_remove_padding: bool
    """Whether rows are packed."""

    def _build_module(self) -> Any:
        """Build the model, with the attention that transformers chooses for it where it lacks that of the settings.

        Raises:
            UserError: it cannot be built: no other try would end otherwise.
        """
        try:
            with _count_heads(self.model_config.hf_config):
                return super()._build_module()
        except _REFUSALS as error:
            config = self.model_config.hf_config
            wanted, config._attn_implementation = config._attn_implementation, None
            try:
                with _count_heads(config):
                    module = super()._build_module()
            except Exception as other:  # noqa: BLE001 - it was not the attention, whatever it is
                first = error if repr(other) == repr(error) else f"{error!r}, and with its own attention {other!r}"
                raise UserError(
                    f"models of the kind {config.model_type} cannot be trained here: the model in "
                    f"{self.model_config.path} cannot be built ({first}); set model.path to another one"
                ) from error
            self._pad_instead(f"{type(module).__name__} has no attention {wanted} ({error!r})")
            return module

    def initialize(self) -> None:
        """Build model and optimizer; rows are padded where the model does not keep packed ones apart."""
        super().initialize()
        if self.use_remove_padding:
            if problem := self._find_packing_problem():
                self._pad_instead(problem)
            reshard(self.module)

    def _pad_instead(self, reason: str) -> None:
        event = "rows_are_padded" if self.use_remove_padding else "attention_replaced"
        self.use_remove_padding = False
        if torch.distributed.get_rank() == 0:
            get_logger().warning(event, reason=reason, model=self.model_config.hf_config.model_type)

    def _find_packing_problem(self) -> str | None:
        """Find out why rows must not be packed; None: they may be. Where they must not, attention is set for padding.

        Raises:
            UserError: the model computes neither packed nor padded rows.
        """
        model, device = get_base(self.module), torch.device(get_device_name())
        packing, padding = model.config._attn_implementation, model.get_correct_attn_implementation(None)
        rows = draw_rows(model.config, self.engine_config.max_token_len_per_gpu, device)

        def compute(rows: Sequence[torch.Tensor], packed: bool, which: int) -> torch.Tensor:
            model.set_attn_implementation(packing if packed else padding)
            return self._compute_places(*build_probe(rows, packed, which))[0 if packed else which].float()

        with self._probe():
            problem = self._measure(compute, rows)
            if problem is None:
                model.set_attn_implementation(packing)
                return None
            self.module.eval()
            try:
                compute(rows[::2], False, 1)
            except Exception as error:
                raise UserError(
                    f"models of the kind {model.config.model_type} cannot be trained here: {problem}, nor padded ones "
                    f"({error!r}); set model.path to one of another kind"
                ) from error
        return problem

    def find_tree_problem(self) -> str | None:
        """Find out why rows must not be computed as a tree of their prefixes; None: they may be."""
        model, device = get_base(self.module), torch.device(get_device_name())
        own, padding = model.config._attn_implementation, model.get_correct_attn_implementation(None)
        rows = draw_forked_rows(model.config, self.engine_config.max_token_len_per_gpu, device)

        def compute(rows: Sequence[torch.Tensor], packed: bool, which: int) -> torch.Tensor:
            model.set_attn_implementation(PREFIX_TREE if packed else padding)
            return self._compute_places(*build_tree_probe(rows, packed, which))[0 if packed else which].float()

        try:
            with self._probe():
                if problem := self._measure(compute, rows):
                    return problem
                self.module.train()
                one, other = (compute(rows[::2], True, 1) for _ in range(2))
            is_same = torch.allclose(one, other, rtol=0, atol=_CHANCE * float(one.std()))
            return None if is_same else "it draws at random in training, for each token of each row"
        finally:
            model.set_attn_implementation(own)

    @contextmanager
    def _probe(self) -> Iterator[None]:
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with self.eval_mode(), torch.no_grad(), torch.random.fork_rng(devices):
            yield

    def _measure(self, compute: Compute, rows: Sequence[torch.Tensor]) -> str | None:
        """Find out why rows must not be packed; None: they may be."""
        try:
            self.module.train()  # an attention that lacks dropout refuses it only then
            compute(rows[::2], True, 1)
            self.module.eval()
            differences = agree(measure_packing(compute, rows), torch.device(get_device_name()))
            return differences.find_problem(self._autocast_dtype)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a model's code does with packed rows, padded ones may do
            return f"it computes no packed rows ({error!r})"

    def _lay_out(self, micro_batch: TensorDict) -> Layout:
        if tu.get_non_tensor_data(micro_batch, SHARES, False):
            return TreeLayout.of_tree(micro_batch)
        return Layout.of(micro_batch, self.use_remove_padding)

    def _compute_places(self, inputs: dict[str, Any], places: torch.Tensor) -> torch.Tensor:
        """Compute outputs of the tokens in the given columns, (rows, places, width)."""
        dtype = self._autocast_dtype
        with torch.autocast(get_device_name(), dtype=dtype, enabled=dtype != torch.float32):
            return self._score_places(inputs, places)

    def _score_places(self, inputs: dict[str, Any], places: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _build_fsdp_module(self, module: Any) -> Any:
        """Leave a forward-only model on the device unless its parameters are to be offloaded; verl offloads each."""
        config = self.engine_config
        forward_only = config.forward_only
        config.forward_only = forward_only and config.param_offload
        try:
            return super()._build_fsdp_module(module)
        finally:
            config.forward_only = forward_only

    def _build_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        """Add the linear course to verl's constant one and cosine."""
        config = self.optimizer_config
        if config.lr_scheduler_type != "linear":
            return super()._build_lr_scheduler(optimizer)
        warm_up, least = int(config.lr_warmup_steps), float(config.min_lr_ratio)
        rest = max(1, int(config.total_training_steps) - warm_up)

        def scale(step: int) -> float:
            if step < warm_up:
                return step / warm_up
            return max(least, 1 - (1 - least) * (step - warm_up) / rest)

        return LambdaLR(optimizer, scale)


class ScoringEngine(_Engine, FSDPEngineWithLMHead):  # type: ignore[misc, unused-ignore]
    """Log-probabilities and entropies of a language model."""

    _head: FusedHead | None = None

    def _build_module(self) -> Any:
        module = super()._build_module()
        if self.model_config.use_fused_kernels:
            obstacle = find_obstacle(module)
            if obstacle is None:
                self._head = FusedHead.adopt(module)
            else:
                get_logger().warning("logits_are_kept", reason=obstacle, model=type(module).__name__)
        return module

    def _build_lora_module(self, module: Any) -> Any:
        module = super()._build_lora_module(module)
        if isinstance(module.get_output_embeddings(), LoraLayer):  # verl fails to shard it
            raise UserError(
                "trainer.lora.target_modules has the output layer, which cannot have an adapter: leave it out"
            )
        return module

    def _score_places(self, inputs: dict[str, Any], places: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.module(**inputs, logits_to_keep=places, use_cache=False).logits
        return logits

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        """Ask for the needed tokens only."""
        layout = self._lay_out(micro_batch)
        kept, chosen = layout.choose()
        temperature, labels = micro_batch["temperature"], torch.cat(list(split_rows(micro_batch["responses"])))
        is_each = isinstance(temperature, torch.Tensor)
        question = HeadQuery(
            labels=layout.ask(labels),
            temperature=layout.ask(temperature[layout.rows]) if is_each else float(temperature),
            chosen=chosen,
            entropy=tu.get_non_tensor_data(micro_batch, "calculate_entropy", False),
            entropy_gradient=tu.get_non_tensor_data(micro_batch, "entropy_gradient", True),
        )
        if self._head is not None:
            self._head.question = question
        inputs = layout.build_inputs(micro_batch["input_ids"]) | {"logits_to_keep": kept}
        return inputs, {"layout": layout, "question": question}

    def prepare_model_outputs(
        self,
        output: Any,
        output_args: dict[str, Any],
        micro_batch: TensorDict,
        logits_processor_func: Callable[..., Any] | None,
    ) -> dict[str, torch.Tensor]:
        """Compute `log_probs` (and `entropy`), packed, as long as the rows; entry i belongs to token i + 1.

        Entries before the response's first token are 0.
        """
        layout, question = output_args["layout"], output_args["question"]
        if self._head is not None:
            log_probs, entropy = output.logits.squeeze(0).unbind(-1)
        else:
            log_probs, entropy = score_logits(output.logits, question)
        outputs = {"log_probs": layout.spread(log_probs)}
        if question.entropy:
            outputs["entropy"] = layout.spread(entropy if question.entropy_gradient else entropy.detach())
        return outputs


class ValueEngine(_Engine, FSDPEngineWithValueHead):  # type: ignore[misc, unused-ignore]
    """Values of a value model."""

    def _score_places(self, inputs: dict[str, Any], places: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.module(**inputs, use_cache=False).logits[:, places]
        return values

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        layout = self._lay_out(micro_batch)
        return layout.build_inputs(micro_batch["input_ids"]), {"layout": layout}

    def prepare_model_outputs(
        self,
        output: Any,
        output_args: dict[str, Any],
        micro_batch: TensorDict,
        logits_processor_func: Callable[..., Any] | None,
    ) -> dict[str, torch.Tensor]:
        """Compute `values`, packed, as long as the rows; entry i is the value after token i."""
        layout, values = output_args["layout"], output.logits.squeeze(-1)
        return {"values": layout.finish(layout.collect(values))}
