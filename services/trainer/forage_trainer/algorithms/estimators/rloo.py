"""RLOO (arXiv:2402.14740), by verl: a sample's reward minus the mean of the other samples of its prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from verl.trainer.ppo.core_algos import compute_rloo_outcome_advantage


def rloo(token_rewards: torch.Tensor, mask: torch.Tensor, uids: Sequence[str]) -> torch.Tensor:
    """Compute score - mean of the others' scores on every token of the mask, (rows, tokens) float32; also the returns.

    Args:
        token_rewards: (rows, tokens); a score is their sum.
        mask: (rows, tokens), 1 on tokens that are trained on.
        uids: group of each row.
    """
    advantages, _ = compute_rloo_outcome_advantage(token_rewards.double(), mask, np.array(uids))
    return advantages.float()
