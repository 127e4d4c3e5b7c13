"""KL to the reference as a penalty in the reward, and the controller of its coefficient.

Stiennon et al. (arXiv:2009.01325) and Ziegler et al. (arXiv:1909.08593): r - beta * k on every token, with k one of
verl's estimates: kl, abs, mse, low_var_kl.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from verl.trainer.ppo.core_algos import kl_penalty

from forage_runtime.settings import KlControlSettings

_CLIP = 0.2


@dataclass(frozen=True)
class PenalizedRewards:
    """Rewards after the KL penalty.

    token_rewards: (rows, tokens). kl: mean over rows of the mean over a row's tokens, NaN and infinity included.
    non_finite: number of tokens whose KL was NaN or infinite; their reward is unchanged.
    """

    token_rewards: torch.Tensor
    kl: float
    non_finite: int


def apply_kl_penalty(
    token_rewards: torch.Tensor,
    log_probs: torch.Tensor,
    reference: torch.Tensor,
    mask: torch.Tensor,
    kind: str,
    beta: float,
) -> PenalizedRewards:
    """Subtract `beta` times the KL of each token of the mask from its reward.

    Args:
        token_rewards, log_probs, reference: (rows, tokens), the log-probabilities of policy and reference.
        mask: (rows, tokens), 1 on tokens that are trained on.
        kind: kl, abs, mse or low_var_kl.
    """
    inside = mask.bool()
    kl = torch.where(inside, kl_penalty(log_probs, reference, kind), 0.0)
    finite = kl.isfinite()
    return PenalizedRewards(
        # One token without a finite KL must not turn the rewards of a whole row into NaN.
        token_rewards - beta * torch.where(finite, kl, 0.0),
        float((kl.sum(-1) / inside.sum(-1).clamp(min=1)).mean()),
        int((~finite).sum()),
    )


class KlController:
    """The coefficient beta, fixed or adaptive.

    Adaptive: beta * max(0, 1 + clip(kl / target - 1, -0.2, 0.2) * rows / horizon) after a step. A KL that is not
    finite leaves beta unchanged; `skipped` counts these updates.
    """

    def __init__(self, settings: KlControlSettings) -> None:
        self._settings = settings
        self.beta = settings.kl_coef
        self.skipped = 0

    def update(self, kl: float, rows: int) -> None:
        """Adapt beta to the mean KL of a step with so many rows."""
        if not math.isfinite(kl):
            self.skipped += 1
        elif self._settings.type == "adaptive":
            error = min(max(kl / self._settings.target_kl - 1, -_CLIP), _CLIP)
            self.beta *= max(0.0, 1 + error * rows / self._settings.horizon)

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint."""
        return {"beta": self.beta, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a state of `state_dict`; a fixed coefficient stays that of the settings."""
        if self._settings.type == "adaptive":
            self.beta = float(state["beta"])
        self.skipped = int(state["skipped"])
