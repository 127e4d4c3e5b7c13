"""Which trajectories of a batch take part in a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forage_common.settings import AdvantageEstimator, AlgorithmSettings
from forage_common.v1.trajectory_pb2 import Status, Trajectory, TrajectoryGroup
from forage_trainer.algorithms.estimators.groups import participation
from forage_trainer.algorithms.token_rewards import reward_of


@dataclass(frozen=True)
class Selection:
    """Rows that take part, and why groups do not.

    trajectories: the rows; positions: place of each one's group within the batch.
    dead_groups: groups with too few valid rows.
    filtered: places of groups left out because their rewards are all equal.
    """

    trajectories: tuple[Trajectory, ...]
    positions: tuple[int, ...]
    dead_groups: int
    filtered: tuple[int, ...]


def selection(groups: Sequence[TrajectoryGroup], settings: AlgorithmSettings) -> Selection:
    """Valid rows of groups that have enough of them for the estimator and, where the settings ask for it, unequal
    rewards."""
    rows = [(place, t) for place, group in enumerate(groups) for t in group.trajectories]
    valid = torch.tensor([is_valid(t) for _, t in rows], dtype=torch.bool)
    found = participation([place for place, _ in rows], valid, settings.adv_estimator.min_samples)
    # A group that came back empty has no rows to be counted by.
    dead = found.dead_groups + sum(not group.trajectories for group in groups)
    filtered = equal_groups(groups, settings.adv_estimator) if settings.filter_groups else ()
    used = [row for row, use in zip(rows, found.used.tolist(), strict=True) if use and row[0] not in filtered]
    return Selection(tuple(t for _, t in used), tuple(place for place, _ in used), dead, filtered)


def equal_groups(groups: Sequence[TrajectoryGroup], estimator: AdvantageEstimator) -> tuple[int, ...]:
    """Places of groups with two valid rows or more whose rewards are all equal, so that no row is better than another.

    Multi-turn GRPO compares what turns earned, so for it those must be equal too.
    """
    found = []
    for place, group in enumerate(groups):
        valid = [t for t in group.trajectories if is_valid(t)]
        if len(valid) < 2:
            continue
        if estimator is AdvantageEstimator.GRPO_MULTITURN:
            rewards = [reward_of(t.score) for t in valid]
            turns = {value for reward in rewards for value in reward.turns.values()}
            equal = len(turns) <= 1 and len({reward.whole for reward in rewards}) == 1
        else:
            equal = len({t.score.total for t in valid}) == 1
        if equal:
            found.append(place)
    return tuple(found)


def is_valid(trajectory: Trajectory) -> bool:
    """Whether a trajectory may enter loss and baseline.

    No failure anywhere, a finite reward, at least one state token, and one value a response token in every field.
    """
    response = len(trajectory.token_ids) - trajectory.prompt_length
    return (
        trajectory.status == Status.STATUS_OK
        and trajectory.score.status == Status.STATUS_OK
        and math.isfinite(trajectory.score.total)
        and all(math.isfinite(part.weighted) for part in trajectory.score.components)
        and trajectory.prompt_length > 0
        and 1 in trajectory.loss_mask
        and response == len(trajectory.loss_mask) == len(trajectory.turn_ids) == len(trajectory.logprobs)
    )
