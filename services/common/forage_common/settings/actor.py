"""Settings of the trained models: the actor, the critic, their optimizers, and the engine that trains them."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from forage_common.settings.algorithm import KL_KINDS
from forage_common.settings.base import Section

LOSS_AGG_MODES = "^(token-mean|seq-mean-token-sum|seq-mean-token-mean|seq-mean-token-sum-norm)$"


class OptimSettings(Section):
    lr: float = Field(1e-6, gt=0)
    lr_warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.01, ge=0)
    clip_grad: float = Field(1.0, gt=0)


class ActorSettings(Section):
    optim: OptimSettings = OptimSettings()
    ppo_mini_batch_size: int = Field(16, ge=1, description="prompts an update; divides data.train_batch_size")
    ppo_epochs: int = Field(1, ge=1)
    clip_ratio: float = Field(0.2, gt=0)
    clip_ratio_high: float = Field(0.28, gt=0)
    clip_ratio_c: float = Field(3.0, gt=1, description="dual clip: most that a ratio counts where the advantage is < 0")
    loss_agg_mode: str = Field("token-mean", pattern=LOSS_AGG_MODES)
    loss_scale_factor: int | None = Field(
        None, ge=1, description="seq-mean-token-sum-norm (Dr. GRPO): what a sum over tokens is divided by"
    )
    use_kl_loss: bool = True
    kl_loss_coef: float = Field(0.001, ge=0)
    kl_loss_type: str = Field("low_var_kl", pattern=KL_KINDS)
    entropy_coeff: float = 0.0
    ppo_max_token_len_per_gpu: int = Field(8192, ge=1)

    @model_validator(mode="after")
    def _scaled(self) -> ActorSettings:
        if self.loss_agg_mode == "seq-mean-token-sum-norm" and self.loss_scale_factor is None:
            raise ValueError(
                "loss_agg_mode seq-mean-token-sum-norm needs loss_scale_factor: give the longest response in tokens"
            )
        return self


class CriticSettings(Section):
    """Of the value model that adv_estimator gae needs."""

    path: Path | None = Field(None, description="model folder to start from; null = model.path")
    optim: OptimSettings = OptimSettings(lr=1e-5)
    ppo_mini_batch_size: int = Field(16, ge=1, description="prompts an update; divides data.train_batch_size")
    ppo_epochs: int = Field(1, ge=1)
    cliprange_value: float = Field(0.5, gt=0, description="how far a value may move in a step")
    loss_agg_mode: str = Field("token-mean", pattern="^(token-mean|seq-mean-token-sum|seq-mean-token-mean)$")
    ppo_max_token_len_per_gpu: int = Field(8192, ge=1)


class TrainingEngineSettings(Section):
    """Of verl's FSDP2 engines, names as verl's; null = what suits the machine."""

    attn_implementation: str | None = Field(None, pattern="^(flash_attention_2|sdpa|eager)$")
    use_remove_padding: bool | None = Field(None, description="GPU: rows packed without padding; needs flash attention")
    use_torch_compile: bool | None = None
    param_dtype: str | None = Field(None, pattern="^(bf16|fp32)$", description="of forward and backward passes")
    enable_gradient_checkpointing: bool | None = Field(None, description="recompute activations: less memory, slower")
    param_offload: bool = Field(False, description="GPU: parameters in the machine's memory while not in use")
    optimizer_offload: bool = Field(False, description="GPU: likewise, the optimizer's state")
    offload_policy: bool = Field(
        False, description="GPU: parameters, gradients, optimizer always in the machine's memory"
    )
    reshard_after_forward: bool = Field(True, description="false: parameters stay whole until the backward pass")
    fsdp_size: int = Field(-1, description="processes that one copy of the parameters is split over; -1 = all")
    entropy_from_logits_with_chunking: bool = Field(False, description="GPU: entropy in pieces: less memory")

    @model_validator(mode="after")
    def _consistent(self) -> TrainingEngineSettings:
        if self.use_remove_padding and self.attn_implementation not in (None, "flash_attention_2"):
            raise ValueError(
                f"use_remove_padding needs flash_attention_2, not attn_implementation {self.attn_implementation}"
            )
        if self.fsdp_size == 0 or self.fsdp_size < -1:
            raise ValueError(f"fsdp_size is {self.fsdp_size}: expected -1 or at least 1")
        return self


class LoraSettings(Section):
    """Of the policy: train low-rank adapters beside frozen weights; names as verl's."""

    lora_rank: int = Field(0, ge=0, description="0 = no LoRA")
    lora_alpha: int = Field(16, ge=1)
    target_modules: str | tuple[str, ...] = Field("all-linear", description="all-linear, or names such as q_proj")
