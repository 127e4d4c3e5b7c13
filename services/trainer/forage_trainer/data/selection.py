"""Selection of the trajectories of a batch that take part in a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forage_common.settings import AdvantageEstimator, AlgorithmSettings
from forage_common.v1.trajectory_pb2 import Status, Trajectory, TrajectoryGroup
from forage_trainer.algorithms.estimators.groups import find_participants
from forage_trainer.algorithms.token_rewards import to_structured_reward


@dataclass(frozen=True)
class Selection:
    """Rows that take part, and the groups that do not.

    trajectories: the rows; positions: the position of each row's group within the batch.
    dead_groups: number of groups with too few valid rows.
    filtered: positions of groups left out because their rewards are all equal.
    """

    trajectories: tuple[Trajectory, ...]
    positions: tuple[int, ...]
    dead_groups: int
    filtered: tuple[int, ...]


def select_trajectories(groups: Sequence[TrajectoryGroup], settings: AlgorithmSettings) -> Selection:
    """Select the valid rows of groups that have enough of them for the estimator.

    With `filter_groups` also only those of groups with unequal rewards.
    """
    rows = [(position, t) for position, group in enumerate(groups) for t in group.trajectories]
    valid = torch.tensor([is_valid(t) for _, t in rows], dtype=torch.bool)
    participants = find_participants([position for position, _ in rows], valid, settings.adv_estimator.min_samples)
    # Groups without any trajectory have no rows, so they are counted here.
    dead = participants.dead_groups + sum(not group.trajectories for group in groups)
    filtered = find_equal_groups(groups, settings.adv_estimator) if settings.filter_groups else ()
    used = [row for row, use in zip(rows, participants.used.tolist(), strict=True) if use and row[0] not in filtered]
    return Selection(tuple(t for _, t in used), tuple(position for position, _ in used), dead, filtered)


def find_equal_groups(groups: Sequence[TrajectoryGroup], estimator: AdvantageEstimator) -> tuple[int, ...]:
    """Positions of groups with two or more valid rows whose rewards are all equal: they give no gradient.

    Multi-turn GRPO compares the rewards of turns too, so for it those must also be equal.
    """
    positions = []
    for position, group in enumerate(groups):
        valid = [t for t in group.trajectories if is_valid(t)]
        if len(valid) < 2:
            continue
        if estimator is AdvantageEstimator.GRPO_MULTITURN:
            rewards = [to_structured_reward(t.score) for t in valid]
            turns = {value for reward in rewards for value in reward.turns.values()}
            equal = len(turns) <= 1 and len({reward.whole for reward in rewards}) == 1
        else:
            equal = len({t.score.total for t in valid}) == 1
        if equal:
            positions.append(position)
    return tuple(positions)


def is_valid(trajectory: Trajectory) -> bool:
    """Whether a trajectory may enter loss and baseline.

    Valid: no failure, a finite reward, at least one state token, and one value for each response token in every field.
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
