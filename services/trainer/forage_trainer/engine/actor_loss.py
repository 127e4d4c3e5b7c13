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
from verl.workers.utils.padding import no_padding_2_padding

from forage_common.settings import ActorSettings, CorrectionSettings, OffPolicyCorrection
from forage_trainer.algorithms.off_policy import importance_weights
from forage_trainer.data.tensors import padded

_PER_TOKEN = (
    "response_mask",
    "state_mask",
    "advantages",
    "old_log_probs",
    "ref_log_prob",
    "rollout_log_probs",
)
"""Of a micro-batch, jagged or padded over the response."""


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

    seen: (row numbers, log-probabilities, entropies) of each micro-batch since `clear`; both (rows, tokens) over the
        response, 0 after a row's end.
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
        for name in _PER_TOKEN:
            if name in data:
                data[name] = padded(data[name])
        packed = [model_output[name].detach() for name in ("log_probs", "entropy") if name in model_output]
        flat = [values.values() if values.is_nested else values for values in packed]
        own, *entropy = no_padding_2_padding(torch.stack(flat, -1), data).unbind(-1)
        self.seen.append((data["row"], own, entropy[0] if entropy else None))
        if "old_log_probs" not in data:
            data["old_log_probs"] = own
        if self._correction.mode is not OffPolicyCorrection.NONE:
            data["rollout_is_weights"] = importance_weights(
                data["old_log_probs"], data["rollout_log_probs"], data["state_mask"], self._correction
            )
        loss, metrics = ppo_loss(self._config, model_output, data, dp_group)
        return loss, metrics
