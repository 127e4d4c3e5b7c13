"""REINFORCE++ (arXiv:2501.03262), by verl: discounted returns, whitened over the batch; no group baseline."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from verl.trainer.ppo.core_algos import compute_reinforce_plus_plus_outcome_advantage


def reinforce_plus_plus(
    token_rewards: torch.Tensor, mask: torch.Tensor, gamma: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns), both (rows, tokens) float32, 0 outside the mask.

    The discount counts tokens of the mask only.

    Args:
        token_rewards: (rows, tokens).
        mask: (rows, tokens), 1 on tokens that are trained on.

    Raises:
        ValueError: the mask has fewer than two tokens, so there is nothing to whiten.
    """
    rewards = torch.where(mask.bool(), token_rewards.float(), 0.0)
    advantages, returns = compute_reinforce_plus_plus_outcome_advantage(
        rewards, mask.float(), SimpleNamespace(gamma=gamma)
    )
    return advantages, returns
