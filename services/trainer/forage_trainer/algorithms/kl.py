"""The KL to the reference as a part of the reward, and the coefficient that steers it.

Stiennon et al. (arXiv:2009.01325) and Ziegler et al. (arXiv:1909.08593): r - beta * k on every token, with k one of
verl's estimates: kl, abs, mse, low_var_kl.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from verl.trainer.ppo.core_algos import kl_penalty

from forage_common.settings import KlControl, KlControlSettings

_CLIP = 0.2


@dataclass(frozen=True)
class Penalised:
    """token_rewards: (rows, tokens). kl: mean over rows of the mean over a row's tokens, as it was measured.

    non_finite: tokens whose KL was NaN or infinite; they bear no penalty.
    """

    token_rewards: torch.Tensor
    kl: float
    non_finite: int


def penalised(
    token_rewards: torch.Tensor,
    log_probs: torch.Tensor,
    reference: torch.Tensor,
    mask: torch.Tensor,
    kind: str,
    beta: float,
) -> Penalised:
    """Rewards less `beta` times the KL of each token of the mask.

    Args:
        token_rewards, log_probs, reference: (rows, tokens), the log-probabilities of policy and reference.
        mask: (rows, tokens), 1 on tokens that are trained on.
        kind: kl, abs, mse or low_var_kl.
    """
    inside = mask.bool()
    found = torch.where(inside, kl_penalty(log_probs, reference, kind), 0.0)
    sound = found.isfinite()
    return Penalised(
        token_rewards - beta * torch.where(sound, found, 0.0),
        float((found.sum(-1) / inside.sum(-1).clamp(min=1)).mean()),
        int((~sound).sum()),
    )


class KlController:
    """beta, fixed or adaptive: beta * max(0, 1 + clip(kl / target - 1, -0.2, 0.2) * rows / horizon) after a step.

    A KL that is not finite leaves beta as it is.

    skipped: updates that were left out so.
    """

    def __init__(self, settings: KlControlSettings) -> None:
        self._settings = settings
        self.beta = settings.kl_coef
        self.skipped = 0

    def update(self, kl: float, rows: int) -> None:
        """Steer beta by the mean KL of the so many rows of a step."""
        if not math.isfinite(kl):
            self.skipped += 1
        elif self._settings.type is KlControl.ADAPTIVE:
            error = min(max(kl / self._settings.target_kl - 1, -_CLIP), _CLIP)
            self.beta *= max(0.0, 1 + error * rows / self._settings.horizon)

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"beta": self.beta, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` gave; a fixed coefficient stays that of the settings."""
        if self._settings.type is KlControl.ADAPTIVE:
            self.beta = float(state["beta"])
        self.skipped = int(state["skipped"])
