"""What Forage's engines compute with a model, on every device.

They differ from verl's in the layout of rows (see `layout`) and in what they take from the output layer (see `head`):
log-probabilities and entropies of response tokens alone, never with all logits of a micro-batch at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from tensordict import TensorDict
from torch.optim.lr_scheduler import LambdaLR
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead

from forage_common.errors import UserError
from forage_common.telemetry.logs import get_logger
from forage_trainer.data.tensors import split_rows
from forage_trainer.engine.attention import check_packing, register_varlen
from forage_trainer.engine.head import FusedHead, Question, find_obstacle, score_logits
from forage_trainer.engine.layout import Layout

register_varlen()


class _Engine(FSDPEngine):  # type: ignore[misc, unused-ignore]
    """What both kinds of engines change in how verl builds a model and its optimizer."""

    def _build_module(self) -> Any:
        module = super()._build_module()
        if self.use_remove_padding:
            check_packing(module.config, bool(getattr(module, "_is_stateful", False)))
        return module

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

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        """Ask for the needed tokens only."""
        layout = Layout.of(micro_batch, self.use_remove_padding)
        kept, chosen = layout.choose()
        temperature = micro_batch["temperature"]
        question = Question(
            labels=torch.cat(list(split_rows(micro_batch["responses"]))),
            temperature=temperature[layout.rows] if isinstance(temperature, torch.Tensor) else float(temperature),
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

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        layout = Layout.of(micro_batch, self.use_remove_padding)
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
        return {"values": layout.finish(values.squeeze(0) if layout.packed else layout.pack(values))}
