"""Settings of the trained models: the actor, the critic, their optimizers, and the engine that trains them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from forage_common.settings.algorithm import KlKind
from forage_common.settings.base import Section

ActorAggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
CriticAggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


class OptimSettings(Section):
    """The AdamW optimizer."""

    lr: float = Field(1e-6, gt=0, description="Learning rate after warm-up")
    lr_warmup_steps: int = Field(0, ge=0, description="Steps over which the learning rate rises from 0")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay")
    clip_grad: float = Field(1.0, gt=0, description="Largest gradient norm; larger gradients are scaled down")


class ActorSettings(Section):
    """The policy's loss and its updates; names as verl's."""

    optim: OptimSettings = OptimSettings()
    ppo_mini_batch_size: int = Field(16, ge=1, description="Prompts per update; must divide data.train_batch_size")
    ppo_epochs: int = Field(1, ge=1, description="Passes over a batch")
    clip_ratio: float = Field(0.2, gt=0, description="Lower clipping of the probability ratio, at 1 - clip_ratio")
    clip_ratio_high: float = Field(0.28, gt=0, description="Upper clipping of the ratio, at 1 + clip_ratio_high")
    clip_ratio_c: float = Field(3.0, gt=1, description="Dual clip: highest ratio of tokens with a negative advantage")
    loss_agg_mode: ActorAggregation = Field("token-mean", description="How token losses are aggregated to one loss")
    loss_scale_factor: int | None = Field(
        None, ge=1, description="seq-mean-token-sum-norm (Dr. GRPO): divisor of a sum over tokens"
    )
    use_kl_loss: bool = Field(True, description="Add the KL to the reference policy to the loss")
    kl_loss_coef: float = Field(0.001, ge=0, description="Coefficient of the KL in the loss")
    kl_loss_type: KlKind = Field("low_var_kl", description="KL estimator of the KL in the loss")
    entropy_coeff: float = Field(0.0, description="Coefficient of an entropy bonus in the loss")
    ppo_max_token_len_per_gpu: int = Field(8192, ge=1, description="Most tokens of a micro-batch per process")

    @model_validator(mode="after")
    def _check_scale(self) -> ActorSettings:
        if self.loss_agg_mode == "seq-mean-token-sum-norm" and self.loss_scale_factor is None:
            raise ValueError(
                "loss_agg_mode seq-mean-token-sum-norm needs loss_scale_factor: give the longest response in tokens"
            )
        return self


class CriticSettings(Section):
    """The value model that adv_estimator gae needs; names as verl's."""

    path: Path | None = Field(None, description="Model folder from which the critic starts; null: model.path")
    optim: OptimSettings = OptimSettings(lr=1e-5)
    ppo_mini_batch_size: int = Field(16, ge=1, description="Prompts per update; must divide data.train_batch_size")
    ppo_epochs: int = Field(1, ge=1, description="Passes over a batch")
    cliprange_value: float = Field(0.5, gt=0, description="Largest change of a predicted value in one step")
    loss_agg_mode: CriticAggregation = Field("token-mean", description="How token losses are aggregated to one loss")
    ppo_max_token_len_per_gpu: int = Field(8192, ge=1, description="Most tokens of a micro-batch per process")


class TrainingEngineSettings(Section):
    """verl's FSDP2 training engine, names as verl's; null: chosen for the machine."""

    attn_implementation: Literal["flash_attention_2", "varlen", "flex_attention", "sdpa", "eager"] | None = Field(
        None, description="Attention kernel of Hugging Face Transformers; varlen: PyTorch's for packed rows"
    )
    use_remove_padding: bool | None = Field(
        None, description="Pack rows without padding, which the first three kernels can"
    )
    use_fused_kernels: bool | None = Field(
        None, description="Log-probabilities and entropy in chunks, computed again in the backward pass: no full logits"
    )
    param_dtype: Literal["bf16", "fp32"] | None = Field(None, description="Type of forward and backward passes")
    enable_gradient_checkpointing: bool | None = Field(
        None, description="Recompute activations in the backward pass: less memory, slower"
    )
    param_offload: bool = Field(False, description="GPU: keep parameters in host memory while they are not used")
    optimizer_offload: bool = Field(False, description="GPU: keep optimizer state in host memory while it is not used")
    offload_policy: bool = Field(
        False, description="GPU: keep parameters, gradients and optimizer state in host memory at all times"
    )
    reshard_after_forward: bool = Field(True, description="false: keep parameters unsharded until the backward pass")
    fsdp_size: int = Field(-1, description="Processes that shard one copy of the parameters; -1: all")

    @model_validator(mode="after")
    def _check_consistency(self) -> TrainingEngineSettings:
        if self.use_remove_padding and self.attn_implementation in ("sdpa", "eager"):
            raise ValueError(
                "use_remove_padding needs attn_implementation varlen, flash_attention_2 or flex_attention, "
                f"not {self.attn_implementation}"
            )
        if self.use_remove_padding is False and self.attn_implementation == "varlen":
            raise ValueError("attn_implementation varlen needs packed rows: leave use_remove_padding=false out")
        if self.fsdp_size == 0 or self.fsdp_size < -1:
            raise ValueError(f"fsdp_size is {self.fsdp_size}: expected -1 or at least 1")
        return self


class LoraSettings(Section):
    """Low-rank adapters that are trained instead of the policy's weights; names as verl's."""

    lora_rank: int = Field(0, ge=0, description="Rank of the adapters; 0: all weights are trained")
    lora_alpha: int = Field(16, ge=1, description="Scale of the adapters, as a multiple of 1 / lora_rank")
    target_modules: str | tuple[str, ...] = Field("all-linear", description="all-linear, or names such as q_proj")
