"""Selection of the trajectories of a batch that take part in a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from forage_proto.v1.trajectory_pb2 import Status
from forage_queue.trainer.places import list_slots
from forage_runtime.settings import AdvantageEstimator, AlgorithmSettings, TrainerSettings
from forage_trainer.algorithms.estimators.groups import find_participants
from forage_trainer.algorithms.token_rewards import to_structured_reward
from forage_trajectory.trajectory import Group, Trajectory

LEFT_OUT = "left out of the step, "
"""What the detail of a status begins with where `leave_out_unusable` has given it."""


@dataclass(frozen=True)
class Selection:
    """Rows that take part, and the groups that do not.

    trajectories: the rows; positions: the slot of each row's group within the step (`places.list_slots`), which does
        not depend on the groups that are missing.
    dead_groups: number of groups with too few valid rows.
    filtered: slots of groups left out because their rewards are all equal.
    """

    trajectories: tuple[Trajectory, ...]
    positions: tuple[int, ...]
    dead_groups: int
    filtered: tuple[int, ...]


SELECTED_NONE = Selection((), (), 0, ())


def select_trajectories(groups: Sequence[Group], settings: AlgorithmSettings) -> Selection:
    """Select the valid rows of groups that have enough of them for the estimator.

    With `filter_groups` also only those of groups with unequal rewards.
    """
    rows = [(number, t) for number, group in enumerate(groups) for t in group.trajectories]
    valid = torch.tensor([is_valid(t) for _, t in rows], dtype=torch.bool)
    participants = find_participants([number for number, _ in rows], valid, settings.adv_estimator.min_samples)
    # Groups without any trajectory have no rows, so they are counted here.
    dead = participants.dead_groups + sum(not group.trajectories for group in groups)
    filtered = find_equal_groups(groups, settings.adv_estimator) if settings.filter_groups else ()
    used = [row for row, use in zip(rows, participants.used.tolist(), strict=True) if use and row[0] not in filtered]
    slots = list_slots(groups)
    positions = tuple(slots[number] for number, _ in used)
    return Selection(tuple(t for _, t in used), positions, dead, tuple(slots[number] for number in filtered))


def leave_out_unusable(groups: Sequence[Group], settings: TrainerSettings) -> tuple[list[Group], dict[str, int]]:
    """Give a status to sound trajectories that cannot be trained on, which keeps them out of loss and baseline.

    Those are trajectories longer than a micro-batch, which verl cannot split, and those with a cut context: the engine
    sampled tokens under another context than the one that the trainer would compute their probabilities under.

    Returns:
        The groups, and how many were left out: `too_long_trajectories` and `cut_trajectories`.
    """
    counts = {"too_long_trajectories": 0, "cut_trajectories": 0}
    left = []
    for group in groups:
        reasons = [_find_unusable(trajectory, settings) for trajectory in group.trajectories]
        for which, _ in filter(None, reasons):
            counts[which] += 1
        left.append(replace(group, trajectories=tuple(map(_leave_out, group.trajectories, reasons))))
    return left, counts


def _find_unusable(trajectory: Trajectory, settings: TrainerSettings) -> tuple[str, str] | None:
    """Why a sound trajectory cannot be trained on: what it counts as, and the detail; None where it can."""
    if not is_valid(trajectory):
        return None
    limit = settings.actor.ppo_max_token_len_per_gpu
    if (tokens := trajectory.counts.tokens) > limit:
        reason = f"too long: it has {tokens} tokens, and trainer.actor.ppo_max_token_len_per_gpu is {limit}"
        return "too_long_trajectories", reason
    cut = next((turn for turn in trajectory.turns if turn.context_begin), None)
    if cut is None:
        return None
    return "cut_trajectories", f"cut context: turn {cut.index} was sampled without the first {cut.context_begin} tokens"


def _leave_out(trajectory: Trajectory, reason: tuple[str, str] | None) -> Trajectory:
    if reason is None:
        return trajectory
    return replace(trajectory, status=Status.STATUS_INVALID_INPUT, status_detail=LEFT_OUT + reason[1])


def has_equal_rewards(group: Group, estimator: AdvantageEstimator) -> bool:
    """Whether a group gives no gradient because its rewards are all equal."""
    return bool(find_equal_groups([group], estimator))


def find_equal_groups(groups: Sequence[Group], estimator: AdvantageEstimator) -> tuple[int, ...]:
    """Numbers of the groups with two or more valid rows whose rewards are all equal: they give no gradient.

    Multi-turn GRPO compares the rewards of turns too, so for it those must also be equal.
    """
    equal_groups = []
    for number, group in enumerate(groups):
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
            equal_groups.append(number)
    return tuple(equal_groups)


def is_valid(trajectory: Trajectory) -> bool:
    """Whether a trajectory may enter loss and baseline.

    Valid: no failure, a finite reward, at least one state token, and one value for each response token in every field.
    """
    return (
        trajectory.status == Status.STATUS_OK
        and trajectory.score.status == Status.STATUS_OK
        and math.isfinite(trajectory.score.total)
        and all(math.isfinite(part.weighted) for part in trajectory.score.components)
        and trajectory.prompt_length > 0
        and trajectory.counts.whole
        and trajectory.counts.sampled > 0
    )
