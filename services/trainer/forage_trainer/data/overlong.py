"""What long and cut trajectories cost, after DAPO (Yu et al., arXiv:2503.14476, section 3.4).

With L generated tokens (observations do not count), a penalty begins at max_len - buffer_len, grows to penalty_factor
at max_len, and stays there. It is subtracted from the reward before the advantage. Scores themselves stay as they are:
the metrics, guards and group filters that read them know no penalty.

A trajectory that a limit cut off has no answer, and its reward says little about it. The filter takes it out of the
losses of policy and critic, as DAPO does, not out of its group's baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from forage_runtime.settings import OverlongSettings
from forage_trainer.data.tensors import StepTensors
from forage_trajectory.trajectory import Trajectory


def compute_penalties(lengths: torch.Tensor, settings: OverlongSettings) -> torch.Tensor:
    """Compute what each trajectory's reward loses, from 0 to penalty_factor, by its number of generated tokens."""
    if not settings.buffer_len:
        return torch.zeros_like(lengths, dtype=torch.double)
    beyond = lengths.double() - (settings.max_len - settings.buffer_len)
    return (beyond / settings.buffer_len).clamp(0.0, 1.0) * settings.penalty_factor


def subtract_penalties(tensors: StepTensors, settings: OverlongSettings) -> tuple[StepTensors, dict[str, float]]:
    """Subtract the penalties from the rewards, on the last generated token; returns metrics too."""
    if not settings.buffer_len:
        return tensors, {}
    penalties = compute_penalties(tensors.state.sum(-1), settings)
    rewards, tokens = tensors.token_rewards.clone(), torch.arange(tensors.state.shape[1])
    last = (tensors.state * tokens).argmax(-1)
    rewards[torch.arange(len(rewards)), last] -= penalties
    metrics = {
        "overlong_penalty_mean": float(penalties.mean()),
        "overlong_penalty_share": float((penalties > 0).double().mean()),
    }
    return replace(tensors, token_rewards=rewards, whole_rewards=tensors.whole_rewards - penalties), metrics


def mask_cut(tensors: StepTensors, trajectories: Sequence[Trajectory]) -> tuple[StepTensors | None, int]:
    """Take trajectories without an answer out of the losses: a limit of turns or of a generation's tokens ended them.

    Returns:
        The tensors for the updates, None if there is no other trajectory, and how many were taken out.
    """
    cut = frozenset(row for row, trajectory in enumerate(trajectories) if not trajectory.finished)
    if not cut:
        return tensors, 0
    if len(cut) == len(trajectories):
        return None, len(cut)
    return replace(tensors, untrained=cut), len(cut)
