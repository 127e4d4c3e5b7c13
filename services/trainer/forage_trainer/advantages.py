"""GRPO with outcome rewards, and the rule for which rows take part.

DeepSeekMath (arXiv:2402.03300): a sample's advantage is its reward, centred and scaled within the samples of its
question; Dr. GRPO (arXiv:2503.20783) leaves out the scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

EPSILON = 1e-6


@dataclass(frozen=True)
class Participation:
    """Which rows enter baseline and loss.

    used: (rows,) bool. dead_groups: groups that had fewer than two valid rows, so none of their rows is used.
    """

    used: torch.Tensor
    dead_groups: int


def participation(uids: Sequence[str], valid: torch.Tensor) -> Participation:
    """A valid row is used if its group has at least two of them.

    Args:
        uids: group of each row.
        valid: (rows,) bool; status OK throughout, and at least one state token.
    """
    _, group, count = _group(uids)
    alive = torch.zeros(count, dtype=torch.long).index_add(0, group, valid.long()) >= 2
    return Participation(valid & alive[group], int((~alive).sum()))


def grpo_outcome(
    token_rewards: torch.Tensor, mask: torch.Tensor, uids: Sequence[str], norm_by_std: bool = True
) -> torch.Tensor:
    """Advantages, (rows, tokens), float32.

    A row's score is the sum of its token rewards. Within a uid: mean and standard deviation (ddof 1); a singleton has
    mean 0 and deviation 1. (score - mean) / (std + 1e-6) goes to every token of the mask.

    Args:
        token_rewards: (rows, tokens).
        mask: (rows, tokens), 1 on state tokens.
        uids: group of each row.
        norm_by_std: False leaves out the division (Dr. GRPO).
    """
    # Double precision: equal float32 rewards must give exactly 0, not their rounding divided by epsilon.
    scores = token_rewards.double().sum(-1)
    sizes, group, count = _group(uids)
    singleton = sizes == 1
    mean = torch.zeros(count, dtype=torch.double).index_add(0, group, scores) / sizes
    deviation = scores - mean[group]
    variance = torch.zeros(count, dtype=torch.double).index_add(0, group, deviation**2) / (sizes - 1).clamp(min=1)
    mean = torch.where(singleton, 0.0, mean)
    std = torch.where(singleton, 1.0, variance.sqrt())
    advantages = scores - mean[group]
    if norm_by_std:
        advantages = advantages / (std[group] + EPSILON)
    return (advantages.unsqueeze(-1) * mask).float()


def _group(uids: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(size of each group, group number of each row, number of groups)."""
    numbers = {uid: number for number, uid in enumerate(dict.fromkeys(uids))}
    group = torch.tensor([numbers[uid] for uid in uids], dtype=torch.long)
    return torch.bincount(group, minlength=len(numbers)), group, len(numbers)
