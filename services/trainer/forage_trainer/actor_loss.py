"""verl's PPO loss, with weights for what engine and trainer disagree about.

Clipping (asymmetric and dual), aggregation, entropy and KL loss are verl's. Where a batch gets a single update, the old
log-probabilities are those of the update's own forward pass, so no pass is spent on them.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss

from forage_common.settings import ActorSettings, CorrectionSettings, OffPolicyCorrection
from forage_trainer.off_policy import importance_weights
from forage_trainer.tensors import jagged, over_response


def actor_config(actor: ActorSettings, samples: int) -> FSDPActorConfig:
    """verl's configuration of the loss, for groups of so many samples."""
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
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor,
    )


class ActorLoss:
    """The loss of one micro-batch; keeps the log-probabilities that it saw.

    seen: (row numbers, jagged log-probabilities over the response) of each micro-batch since `clear`.
    """

    def __init__(self, config: FSDPActorConfig, correction: CorrectionSettings) -> None:
        self._config = config
        self._correction = correction
        self.seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []

    def clear(self) -> None:
        self.seen = []

    def __call__(
        self, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        mask = data["response_mask"]
        own = over_response(model_output["log_probs"].detach(), mask)
        entropy = model_output.get("entropy")
        kept = None if entropy is None else over_response(entropy.detach(), mask)
        self.seen.append((data["row"], own, kept))
        if "old_log_probs" not in data:
            data["old_log_probs"] = own
        if self._correction.mode is not OffPolicyCorrection.NONE:
            old, engine, state = data["old_log_probs"], data["rollout_log_probs"], data["state_mask"]
            weights = importance_weights(old.values(), engine.values(), state.values(), self._correction)
            data["rollout_is_weights"] = jagged(weights.split(old.offsets().diff().tolist()))
        loss, metrics = ppo_loss(self._config, model_output, data, dp_group)
        return loss, metrics
