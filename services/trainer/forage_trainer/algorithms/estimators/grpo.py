"""GRPO with outcome rewards.

DeepSeekMath (arXiv:2402.03300): a sample's advantage is its reward, centered and scaled within the samples of its
prompt; Dr. GRPO (arXiv:2503.20783) leaves out the scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forage_trainer.algorithms.estimators.groups import measure_rounding, normalize_in_groups


def grpo_outcome(
    token_rewards: torch.Tensor, mask: torch.Tensor, uids: Sequence[str], norm_by_std: bool = True
) -> torch.Tensor:
    """Compute advantages, (rows, tokens), float32; the returns are the same.

    A row's score, the sum of its token rewards, is normalized within its uid and given to every token of the mask.
    Scores that differ only by the rounding of their terms are equal.

    Args:
        token_rewards: (rows, tokens).
        mask: (rows, tokens), 1 on tokens that are trained on.
        uids: group of each row.
        norm_by_std: False leaves out the division (Dr. GRPO).
    """
    rounding = measure_rounding(token_rewards.abs().sum(-1))
    scores = normalize_in_groups(token_rewards.double().sum(-1), uids, norm_by_std, rounding)
    return (scores.unsqueeze(-1) * mask).float()
