"""Replays of stored trajectories, scored by another reward or sampled again, and their comparison."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Awaitable, Callable
from copy import deepcopy
from dataclasses import dataclass, field

import grpc

from forage_proto.v1.trajectory_pb2 import Prompt, Purpose, Score, Status, Trajectory
from forage_runtime.clients.calls import MalformedReplyError, RefusedError
from forage_runtime.clients.reward import RewardClient, build_score_item
from forage_runtime.clients.rollout import RolloutClient
from forage_runtime.errors import DataError
from forage_runtime.text.enums import name_value

MAX_LARGEST = 5
Replay = Callable[[Trajectory], Awaitable[Trajectory]]


def is_scored(trajectory: Trajectory) -> bool:
    """Whether the trajectory was scored; one that failed before has no text to score."""
    return trajectory.score.status != Status.STATUS_UNSPECIFIED


def make_rescore(reward: RewardClient, end_of_turn: str) -> Replay:
    """Return the function that scores the same text with the running reward service."""

    async def replay(stored: Trajectory) -> Trajectory:
        try:
            (item,) = await reward.score([build_score_item(stored, end_of_turn)])
        except (grpc.RpcError, MalformedReplyError) as error:
            reason = error.details() if isinstance(error, grpc.RpcError) else str(error)
            raise DataError(f"the reward service refuses trajectory {stored.id}: {reason}") from error
        new = deepcopy(stored)
        new.score.CopyFrom(item.score)
        new.validation_score.CopyFrom(item.validation_score)
        judged = item.score.status in (Status.STATUS_OK, Status.STATUS_ABSTAIN)
        new.status = Status.STATUS_OK if judged else item.score.status
        new.status_detail = "" if judged else item.score.detail
        return new

    return replay


def make_rerun(rollout: RolloutClient, run_id: str) -> Replay:
    """Return the function that samples the same prompt tokens and seed with the running policy and services."""

    async def replay(stored: Trajectory) -> Trajectory:
        try:
            group = await rollout.run(build_prompt(stored, run_id))
        except RefusedError as error:
            raise DataError(f"the rollout service refuses trajectory {stored.id}: {error}") from error
        (new,) = group.trajectories
        new.id, new.run_id, new.sample = stored.id, stored.run_id, stored.sample
        new.sampling.CopyFrom(stored.sampling)
        return new

    return replay


def build_prompt(stored: Trajectory, run_id: str) -> Prompt:
    """Build the prompt that samples this one trajectory again."""
    sampling = deepcopy(stored.sampling)
    if sampling.seed:
        sampling.seed += stored.sample
    return Prompt(
        run_id=run_id,
        group_uid=stored.group_uid,
        data_source=stored.data_source,
        token_ids=stored.token_ids[: stored.prompt_length],
        ground_truth=stored.ground_truth,
        samples=1,
        sampling=sampling,
        purpose=Purpose.PURPOSE_VALIDATION,
    )


def is_repeatable(stored: Trajectory) -> bool:
    """Whether the same weights and corpus must give the same trajectory: greedy, or seeded."""
    return stored.sampling.temperature == 0 or stored.sampling.seed != 0


def find_divergence(stored: Trajectory, new: Trajectory) -> str:
    """Find where two trajectories diverge: "" if they do not, else "turn 2" or "observation of turn 1"."""
    before, after = stored.token_ids[stored.prompt_length :], new.token_ids[new.prompt_length :]
    if before == after:
        return ""
    both = zip(before, after, strict=False)
    place = next((i for i, (one, other) in enumerate(both) if one != other), min(len(before), len(after)))
    turn_ids = stored.turn_ids if place < len(before) else new.turn_ids
    if turn_ids[place] > 0:
        return f"turn {turn_ids[place]}"
    return f"observation of turn {max(turn_ids[:place], default=0)}"


@dataclass
class Change:
    """Sums of a metric before and after, over trajectories that have it on both sides."""

    count: int = 0
    before: float = 0.0
    after: float = 0.0
    changed: int = 0

    def add(self, before: float, after: float) -> None:
        self.count += 1
        self.before += before
        self.after += after
        self.changed += before != after


@dataclass
class Comparison:
    """Comparison of stored trajectories with their replays.

    Attributes:
        metrics: "score", "exact match", and the components of the reward.
        statuses: (before, after) where they differ.
        diverged: place → number of trajectories that diverge there; "" counts identical ones.
        largest: (absolute change of the score, id, before, after, detail of the reward), at most `MAX_LARGEST`.
    """

    total: int = 0
    unseeded: int = 0
    metrics: dict[str, Change] = field(default_factory=dict)
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    diverged: Counter[str] = field(default_factory=Counter)
    largest: list[tuple[float, str, float, float, str]] = field(default_factory=list)

    def add(self, stored: Trajectory, new: Trajectory) -> None:
        """Add a stored trajectory and its replay."""
        self.total += 1
        self.unseeded += not is_repeatable(stored)
        self.diverged[find_divergence(stored, new)] += 1
        names = name_value(Status, stored.status, whole=True), name_value(Status, new.status, whole=True)
        if names[0] != names[1]:
            self.statuses[names] += 1
        self._compare("score", stored.score, new.score)
        self._compare("exact match", stored.validation_score, new.validation_score)
        if stored.score.status == new.score.status == Status.STATUS_OK:
            components = {c.name: c.weighted for c in stored.score.components}
            after = {c.name: c.weighted for c in new.score.components}
            for name in components | after:
                self.metrics.setdefault(f"  {name}", Change()).add(components.get(name, 0.0), after.get(name, 0.0))
            self._keep_largest(stored, new)

    def _compare(self, name: str, before: Score, after: Score) -> None:
        metric = self.metrics.setdefault(name, Change())
        if before.status == after.status == Status.STATUS_OK:
            metric.add(before.total, after.total)

    def _keep_largest(self, stored: Trajectory, new: Trajectory) -> None:
        before, after = stored.score.total, new.score.total
        if before != after:
            heapq.heappush(self.largest, (abs(after - before), stored.id, before, after, new.score.detail))
            if len(self.largest) > MAX_LARGEST:
                heapq.heappop(self.largest)
