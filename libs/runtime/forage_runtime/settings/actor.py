"""Settings of the trained models: the actor, the critic, their optimizers, and the engine that trains them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from forage_runtime.settings.algorithm import KlKind
from forage_runtime.settings.base import FunctionName, Section

ActorAggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
CriticAggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


class LossMode(StrEnum):
    """The policy losses of verl that can be trained with, by verl's names."""

    VANILLA = "vanilla"
    GSPO = "gspo"
    CISPO = "cispo"
    SAPO = "sapo"
    GPG = "gpg"
    CLIP_COV = "clip_cov"
    KL_COV = "kl_cov"
    GEO_MEAN = "geo_mean"
    DPPO_TV = "dppo_tv"
    DPPO_KL = "dppo_kl"
    DRO = "dro"


class OptimSettings(Section):
    """The AdamW optimizer."""

    lr: float = Field(1e-6, gt=0, description="Learning rate after warm-up")
    lr_warmup_steps: int = Field(0, ge=0, description="Steps over which the learning rate rises from 0")
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = Field(
        "constant", description="Course of the learning rate from the warm-up to total_training_steps"
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="cosine, linear: lowest learning rate, as a share of lr")
    num_cycles: float = Field(0.5, gt=0, allow_inf_nan=False, description="cosine: its periods; 0.5: down once")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay")
    clip_grad: float = Field(1.0, gt=0, description="Largest gradient norm; larger gradients are scaled down")

    @model_validator(mode="after")
    def _check_schedule(self) -> OptimSettings:
        kind = self.lr_scheduler_type
        if (self.min_lr_ratio and kind == "constant") or (self.num_cycles != 0.5 and kind != "cosine"):
            name = "num_cycles" if self.num_cycles != 0.5 else "min_lr_ratio"
            raise ValueError(f"{name} means nothing to lr_scheduler_type {kind}: leave it out, or take cosine")
        return self


class PolicyLossSettings(Section):
    """The policy loss, one of verl's; names as verl's."""

    loss_mode: LossMode = Field(LossMode.VANILLA, description="Policy loss; vanilla: PPO's clipped one")
    function: FunctionName = Field(
        "", description="A policy loss of your own, FILE.py:FUNCTION or MODULE:FUNCTION, with verl's arguments"
    )
    clip_cov_ratio: float = Field(0.0002, gt=0, le=1, description="clip_cov: share of tokens without a gradient")
    clip_cov_lb: float = Field(1.0, description="clip_cov: such tokens have a covariance above this")
    clip_cov_ub: float = Field(5.0, description="clip_cov: such tokens have a covariance below this")
    kl_cov_ratio: float = Field(0.0002, gt=0, le=1, description="kl_cov: share of tokens with a KL penalty")
    ppo_kl_coef: float = Field(0.1, ge=0, description="kl_cov: coefficient of that penalty")
    dro_beta: float | None = Field(None, gt=0, description="dro: coefficient of the squared log-ratio; needed there")

    @model_validator(mode="after")
    def _check_parameters(self) -> PolicyLossSettings:
        owners = {"clip_cov": LossMode.CLIP_COV, "kl_cov": LossMode.KL_COV, "ppo_kl": LossMode.KL_COV}
        owners["dro"] = LossMode.DRO
        for name, field in type(self).model_fields.items():
            owner = next((owner for prefix, owner in owners.items() if name.startswith(f"{prefix}_")), None)
            if owner not in (None, self.loss_mode) and getattr(self, name) != field.default:
                raise ValueError(f"{name} is for loss_mode {owner}, not {self.loss_mode}: leave it out")
        if self.function and self.loss_mode is not LossMode.VANILLA:
            raise ValueError(f"function is a loss of your own, and loss_mode is {self.loss_mode}: leave one out")
        if self.loss_mode is LossMode.DRO and self.dro_beta is None:
            raise ValueError("loss_mode dro needs dro_beta: give the coefficient of the squared log-ratio, such as 0.1")
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ValueError(f"clip_cov_lb = {self.clip_cov_lb} must be below clip_cov_ub = {self.clip_cov_ub}")
        return self


class ActorSettings(Section):
    """The policy's loss and its updates; names as verl's."""

    optim: OptimSettings = OptimSettings()
    ppo_mini_batch_size: int = Field(16, ge=1, description="Prompts per update; must divide data.train_batch_size")
    ppo_epochs: int = Field(1, ge=1, description="Passes over a batch")
    clip_ratio: float = Field(0.2, gt=0, description="Lower clipping of the probability ratio, at 1 - clip_ratio")
    clip_ratio_high: float = Field(0.28, gt=0, description="Upper clipping of the ratio, at 1 + clip_ratio_high")
    clip_ratio_c: float = Field(3.0, gt=1, description="Dual clip: highest ratio of tokens with a negative advantage")
    policy_loss: PolicyLossSettings = PolicyLossSettings()
    tau_pos: float = Field(1.0, gt=0, description="sapo: steepness of the gate on tokens with a positive advantage")
    tau_neg: float = Field(1.05, gt=0, description="sapo: steepness of the gate on all other tokens")
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
    def _check_loss(self) -> ActorSettings:
        mode = self.policy_loss.loss_mode
        if mode in (LossMode.SAPO, LossMode.GEO_MEAN) and self.loss_agg_mode != "seq-mean-token-mean":
            raise ValueError(
                f"policy_loss.loss_mode {mode} is a mean over trajectories, not {self.loss_agg_mode}: "
                "set loss_agg_mode=seq-mean-token-mean"
            )
        if mode is not LossMode.SAPO and (self.tau_pos, self.tau_neg) != (1.0, 1.05):
            raise ValueError(f"tau_pos and tau_neg are for policy_loss.loss_mode sapo, not {mode}: leave them out")
        return self

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
    fsdp_size: int = Field(-1, description="Processes that shard one copy of the parameters; -1: all")
    args: Annotated[dict[str, Any], "map of values"] = Field(
        default_factory=dict, description="Further fields of verl's FSDPEngineConfig, by its names"
    )

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


class ReferenceSettings(Section):
    """The reference policy of a KL; names as verl's. It computes in trainer.engine.param_dtype and is stored in it."""

    param_offload: bool = Field(
        False, description="GPU: keep its parameters in host memory, and read them layer by layer"
    )


class LoraSettings(Section):
    """Low-rank adapters that are trained instead of the policy's weights; names as verl's."""

    lora_rank: int = Field(0, ge=0, description="Rank of the adapters; 0: all weights are trained")
    lora_alpha: int = Field(16, ge=1, description="Scale of the adapters, as a multiple of 1 / lora_rank")
    target_modules: str | tuple[str, ...] = Field("all-linear", description="all-linear, or names such as q_proj")
