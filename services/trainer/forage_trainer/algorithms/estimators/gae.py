"""Generalised advantage estimation (arXiv:1506.02438) over the tokens of the mask.

delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}, where t + 1 is the next token of the mask
and everything after the last is 0; returns = A + V. The recursion is verl's. Rewards and values outside the mask are
set to 0 before it: verl multiplies them by 0, which leaves NaN as NaN.
"""

from __future__ import annotations

import torch
from verl.trainer.ppo.core_algos import compute_gae_advantage_return


def gae(
    token_rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns), both (rows, tokens) float32, 0 outside the mask.

    Advantages are whitened over the tokens of the mask of all rows: (A - mean) / sqrt(var + 1e-8), ddof 1.

    Args:
        token_rewards, values: (rows, tokens).
        mask: (rows, tokens), 1 on tokens that are trained on.

    Raises:
        ValueError: the mask has fewer than two tokens, so there is nothing to whiten.
    """
    inside = mask.bool()
    rewards, values = (torch.where(inside, part.float(), 0.0) for part in (token_rewards, values))
    advantages, returns = compute_gae_advantage_return(rewards, values, mask.float(), gamma, lam)
    return advantages * mask, returns * mask
