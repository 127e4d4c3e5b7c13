"""Settings of the trained models: the actor, the critic, their optimizers, and the engine that trains them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from forage_runtime.settings.algorithm import KlKind
from forage_runtime.settings.base import Number, Section, is_function_name

ActorAggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


_ABOVE_0 = ("a number above 0", lambda number: number > 0)
_SHARE = ("a number above 0, at most 1", lambda number: 0 < number <= 1)
POLICY_LOSSES: Mapping[str, Mapping[str, Number]] = {
    "vanilla": {},
    "gspo": {},
    "cispo": {},
    "sapo": {"tau_pos": Number(1.0, *_ABOVE_0), "tau_neg": Number(1.05, *_ABOVE_0)},
    "gpg": {},
    "clip_cov": {
        "clip_cov_ratio": Number(0.0002, *_SHARE), "clip_cov_lb": Number(1.0), "clip_cov_ub": Number(5.0),
    },
    "kl_cov": {
        "kl_cov_ratio": Number(0.0002, *_SHARE),
        "ppo_kl_coef": Number(0.1, "a number from 0", lambda number: number >= 0),
    },
    "geo_mean": {},
    "dppo_tv": {},
    "dppo_kl": {},
    "dro": {"dro_beta": Number(None, *_ABOVE_0)},
}  # fmt: skip
"""The policy losses of verl that can be trained with, by verl's names, and the arguments of each."""


def _check_loss_mode(mode: str) -> str:
    if mode not in POLICY_LOSSES and not is_function_name(mode):
        names = ", ".join(POLICY_LOSSES)
        raise ValueError(f"expected {names}, or a loss of your own, FILE.py:FUNCTION or MODULE:FUNCTION")
    return mode


_MODES = "|".join(POLICY_LOSSES)
_LossMode = Annotated[
    str,
    AfterValidator(_check_loss_mode),
    Field(json_schema_extra={"pattern": f"^({_MODES})$|:"}),
    f"{_MODES.replace('|', ' | ')} | FILE.py:FUNCTION | MODULE:FUNCTION",
]


class OptimSettings(Section):
    """The AdamW optimizer."""

    lr: float = Field(1e-6, gt=0, description="Learning rate after warm-up")
    lr_warmup_steps: int = Field(0, ge=0, description="Steps over which the learning rate rises from 0")
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = Field(
        "constant", description="Course of the learning rate from the warm-up to total_training_steps"
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="cosine, linear: lowest learning rate, as a share of lr")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay")
    clip_grad: float = Field(1.0, gt=0, description="Largest gradient norm; larger gradients are scaled down")

    @model_validator(mode="after")
    def _check_schedule(self) -> OptimSettings:
        if self.min_lr_ratio and self.lr_scheduler_type == "constant":
            raise ValueError("min_lr_ratio means nothing to lr_scheduler_type constant: leave it out, or take cosine")
        return self


class PolicyLossSettings(Section):
    """The policy loss, one of verl's or your own; names as verl's."""

    loss_mode: _LossMode = Field(
        "vanilla", description="Policy loss; vanilla: PPO's clipped one; a function of your own has verl's arguments"
    )
    args: dict[str, float] = Field(
        default_factory=dict,
        description="Its arguments; sapo: tau_pos, tau_neg; clip_cov: clip_cov_ratio, clip_cov_lb, clip_cov_ub;"
        " kl_cov: kl_cov_ratio, ppo_kl_coef; dro: dro_beta",
    )

    @property
    def function(self) -> str:
        """The loss of the user's own; empty: it is one of verl's."""
        return "" if self.loss_mode in POLICY_LOSSES else self.loss_mode

    @property
    def all_args(self) -> dict[str, float]:
        """`args`, and the defaults of those that it leaves out."""
        known = POLICY_LOSSES.get(self.loss_mode, {})
        return {name: number.default for name, number in known.items() if number.default is not None} | self.args

    @model_validator(mode="after")
    def _check_args(self) -> PolicyLossSettings:
        known = POLICY_LOSSES.get(self.loss_mode, {})
        for name, value in self.args.items():
            if name not in known:
                takes = f"takes {' and '.join(known)}" if known else "takes none"
                raise ValueError(f"args has {name}, and loss_mode {self.loss_mode} {takes}: leave it out")
            known[name].check(f"args.{name} of loss_mode {self.loss_mode}", value)
        if missing := sorted(known.keys() - self.all_args.keys()):
            raise ValueError(f"loss_mode {self.loss_mode} needs args.{missing[0]}: {known[missing[0]].expected}")
        low, high = (self.all_args.get(f"clip_cov_{name}", math.nan) for name in ("lb", "ub"))
        if low >= high:
            raise ValueError(f"args.clip_cov_lb = {low} must be below args.clip_cov_ub = {high}")
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
        if mode in ("sapo", "geo_mean") and self.loss_agg_mode != "seq-mean-token-mean":
            raise ValueError(
                f"policy_loss.loss_mode {mode} is a mean over trajectories, not {self.loss_agg_mode}: "
                "set loss_agg_mode=seq-mean-token-mean"
            )
        return self

    @model_validator(mode="after")
    def _check_scale(self) -> ActorSettings:
        if self.loss_agg_mode == "seq-mean-token-sum-norm" and self.loss_scale_factor is None:
            raise ValueError(
                "loss_agg_mode seq-mean-token-sum-norm needs loss_scale_factor: give the longest response in tokens"
            )
        return self


class CriticOptimSettings(Section):
    """The critic's AdamW optimizer; the rest is as in trainer.actor.optim."""

    lr: float = Field(1e-5, gt=0, description="Learning rate after warm-up")
    lr_warmup_steps: int = Field(0, ge=0, description="Steps over which the learning rate rises from 0")


class CriticSettings(Section):
    """The value model that adv_estimator gae needs; names as verl's.

    Epochs, mini-batches, micro-batches and the aggregation of its loss are the actor's; for seq-mean-token-sum-norm,
    whose divisor is the actor's own, token-mean.
    """

    path: Path | None = Field(None, description="Model folder from which the critic starts; null: model.path")
    optim: CriticOptimSettings = CriticOptimSettings()
    cliprange_value: float = Field(0.5, gt=0, description="Largest change of a predicted value in one step")


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
    args: Annotated[dict[str, Any], "map of values"] = Field(
        default_factory=dict,
        description="Fields of verl's FSDPEngineConfig, by its names, such as offload_policy (GPU: parameters,"
        " gradients and optimizer state in host memory at all times), param_offload and optimizer_offload (while they"
        " are not used), fsdp_size (processes that shard one copy of the parameters; -1: all)",
    )

    @property
    def param_offload(self) -> bool:
        return bool(self.args.get("param_offload"))

    @property
    def optimizer_offload(self) -> bool:
        return bool(self.args.get("optimizer_offload"))

    @property
    def offload_policy(self) -> bool:
        return bool(self.args.get("offload_policy"))

    @property
    def fsdp_size(self) -> int:
        return int(self.args.get("fsdp_size", -1))

    @model_validator(mode="after")
    def _check_consistency(self) -> TrainingEngineSettings:
        if self.use_remove_padding and self.attn_implementation in ("sdpa", "eager"):
            raise ValueError(
                "use_remove_padding needs attn_implementation varlen, flash_attention_2 or flex_attention, "
                f"not {self.attn_implementation}"
            )
        if self.use_remove_padding is False and self.attn_implementation == "varlen":
            raise ValueError("attn_implementation varlen needs packed rows: leave use_remove_padding=false out")
        size = self.args.get("fsdp_size", -1)
        if not isinstance(size, int) or size == 0 or size < -1:
            raise ValueError(f"args.fsdp_size is {size!r}: expected -1 or at least 1")
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
