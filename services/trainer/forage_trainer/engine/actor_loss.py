"""verl's policy losses, with importance weights for the difference between the engine's policy and the trainer's.

Clipping (asymmetric and dual), aggregation, entropy and KL loss are verl's. Where a batch gets a single update, the
policy has not changed before it, so the old log-probabilities are those of the update's own forward pass; a separate
pass would give the same values.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from forage_runtime.settings import ActorSettings, CorrectionSettings, PolicyLossSettings
from forage_trainer.algorithms.off_policy import importance_weights
from forage_trainer.data.tensors import pad_jagged
from forage_trainer.extensions import ExtensionError, describe_given, load_function

_PER_TOKEN = ("response_mask", "state_mask", "advantages", "old_log_probs", "ref_log_prob", "rollout_log_probs")
"""Fields of a micro-batch over the response, jagged or padded."""
_OF_ACTOR = ("tau_pos", "tau_neg")
"""Arguments of losses that are not in verl's section of the loss, but in the actor's."""
_GEO_MEAN = "geo_mean_of_update"


def build_actor_config(actor: ActorSettings, samples: int) -> FSDPActorConfig:
    """Build verl's configuration of the loss, for groups of so many samples."""
    return FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=samples,
        ppo_mini_batch_size=actor.ppo_mini_batch_size,
        ppo_micro_batch_size_per_gpu=1,
        use_dynamic_bsz=True,
        ppo_max_token_len_per_gpu=actor.ppo_max_token_len_per_gpu,
        clip_ratio=actor.clip_ratio,
        clip_ratio_low=actor.clip_ratio,
        clip_ratio_high=actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c,
        use_kl_loss=actor.use_kl_loss,
        kl_loss_coef=actor.kl_loss_coef,
        kl_loss_type=actor.kl_loss_type,
        entropy_coeff=actor.entropy_coeff,
        policy_loss=_build_policy_loss(actor.policy_loss),
        **{name: value for name, value in actor.policy_loss.all_args.items() if name in _OF_ACTOR},
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor,
    )


def _build_policy_loss(loss: PolicyLossSettings) -> PolicyLossConfig:
    mode = _GEO_MEAN if loss.loss_mode == "geo_mean" else loss.loss_mode
    if loss.function:
        mode = _register_function(loss.function)
    args = {name: value for name, value in loss.all_args.items() if name not in _OF_ACTOR}
    return PolicyLossConfig(**args, loss_mode=mode)


def _register_function(source: str) -> str:
    """Register a loss of the user's own with verl; returns its name there.

    Raises:
        SettingsError: as `load_function`.
    """
    setting = "trainer.actor.policy_loss.loss_mode"
    function = load_function(setting, source)

    @register_policy_loss(source)  # type: ignore[untyped-decorator, unused-ignore]
    def compute(**given: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        found = function(**given)
        loss, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            lacks = " without a gradient" if isinstance(loss, torch.Tensor) and not loss.requires_grad else ""
            expected = "a scalar tensor with a gradient, and a dict of metrics if it has some"
            raise ExtensionError(f"{setting} = '{source}' gave {describe_given(loss)}{lacks}: expected {expected}")
        return loss, metrics

    return source


@register_policy_loss(_GEO_MEAN)  # type: ignore[untyped-decorator, unused-ignore]
def _compute_geo_mean(*, response_mask: torch.Tensor, config: FSDPActorConfig, **given: Any) -> Any:
    """Compute verl's loss geo_mean, a mean over the rows of a micro-batch, as a mean over those of the update."""
    loss, metrics = get_policy_loss_fn("geo_mean")(response_mask=response_mask, config=config, **given)
    update = config.global_batch_info
    return loss * len(response_mask) * update["dp_size"] / update["global_batch_size"], metrics


class ActorLoss:
    """The loss of one micro-batch. It records the log-probabilities of each forward pass.

    passes: (row numbers, log-probabilities, entropies) of each micro-batch since `clear`; both (rows, tokens) over the
        response, 0 after a row's end.
    """

    def __init__(self, config: FSDPActorConfig, correction: CorrectionSettings) -> None:
        self._config = config
        self._correction = correction
        self.passes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []

    def clear(self) -> None:
        self.passes = []

    def __call__(
        self, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        for name in _PER_TOKEN:
            if name in data:
                data[name] = pad_jagged(data[name])
        packed = [model_output[name].detach() for name in ("log_probs", "entropy") if name in model_output]
        flat = [values.values() if values.is_nested else values for values in packed]
        log_probs, *entropy = no_padding_2_padding(torch.stack(flat, -1), data).unbind(-1)
        self.passes.append((data["row"], log_probs, entropy[0] if entropy else None))
        if "old_log_probs" not in data:
            data["old_log_probs"] = log_probs
        # Of the old log-probabilities, not the current ones: the weight corrects for the policy that sampled, and
        # stays constant over the updates of a step; PPO's own ratio covers the change since.
        if self._correction.mode != "none":
            data["rollout_is_weights"] = importance_weights(
                data["old_log_probs"], data["rollout_log_probs"], data["state_mask"], self._correction
            )
        loss, metrics = ppo_loss(self._config, model_output, data, dp_group)
        return loss, metrics
