"""Scores items by the reward of their data source. Bad items and failing rewards get a status, never a 0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import Counter

from forage_common.settings import RewardComponent, RewardRoute
from forage_common.telemetry.logs import get_logger
from forage_common.v1 import reward_pb2, trajectory_pb2
from forage_reward import registry
from forage_reward.composition import Part, composed
from forage_reward.reward import AnyReward, Scorer
from forage_reward.rewards import countdown
from forage_reward.score import Score, Status, refused
from forage_reward.trajectory import GroundTruth, TrajectoryView
from forage_reward.wire import InvalidItemError, to_proto, truth_of, view_of

FAILURES = Counter("forage_reward_failures_total", "Rewards that raised or gave no finite number", ["reward"])
VALIDATION = "em"
"""The reward that validation is measured by, with its default parameters. Where the ground truth is a countdown
problem, which has no accepted answers, it is `countdown` with nothing for a wrong equation: 1 or 0 as well."""

_trajectory: ContextVar[str] = ContextVar("trajectory", default="")


class Judged(NamedTuple):
    """The reply for an item, the message of its score, which others share, and what the rewards saw of it; None of an
    item at fault."""

    reply: reward_pb2.ScoredItem
    score: trajectory_pb2.Score
    seen: tuple[TrajectoryView, GroundTruth] | None


@dataclass(frozen=True)
class _Route:
    reward: str
    scorer: Scorer


class Judge:
    """The rewards of a run, ready to score. Any number of threads may share one.

    Raises:
        SettingsError: a route names an unknown reward or parameter.
    """

    def __init__(
        self,
        routes: Mapping[str, RewardRoute],
        user: Mapping[str, AnyReward] | None = None,
        where: str = "reward.routes",
    ) -> None:
        self.rewards = {**registry.REWARDS, **(user or {})}
        self._routes = {source: route_of(route, self.rewards, f"{where}.{source}") for source, route in routes.items()}
        self._blocking = {
            source
            for source, route in routes.items()
            if any(self.rewards[part.name].blocking for part in _parts(route))
        }
        self._validation = _Route(VALIDATION, guarded(VALIDATION, registry.scorer(VALIDATION, {}, "validation")))
        puzzle = registry.scorer(countdown.NAME, {"format_score": 0.0}, "validation")
        self._countdown_validation = _Route(countdown.NAME, guarded(countdown.NAME, puzzle))
        self._sources: dict[str, list[str]] = {name: [] for name in self.rewards}
        for source, route in routes.items():
            for name in dict.fromkeys(part.name for part in _parts(route)):
                self._sources[name].append(source)

    def data_sources(self, reward: str) -> list[str]:
        """The data sources that are routed to a reward."""
        return self._sources[reward]

    def routed(self, data_source: str) -> bool:
        """Whether a data source has a reward."""
        return data_source in self._routes

    def blocking(self, data_source: str) -> bool:
        """Whether the reward of a data source waits for something outside of this process."""
        return data_source in self._blocking

    def score(self, item: reward_pb2.ScoreItem) -> reward_pb2.ScoredItem:
        """The training and the validation score of one trajectory. Never raises on an item's content."""
        return self.judged(item).reply

    def judged(self, item: reward_pb2.ScoreItem) -> Judged:
        """The same, and what the rewards saw."""
        route = self._routes.get(item.data_source)
        if route is None:
            known = ", ".join(sorted(self._routes)) or "none"
            detail = f"data source '{item.data_source}' has no route: add it to reward.routes (known: {known})"
            return _refusal(item, refused(Status.INVALID_INPUT, "", detail))
        try:
            view, truth = view_of(item), truth_of(item)
        except InvalidItemError as error:
            return _refusal(item, refused(Status.INVALID_INPUT, route.reward, str(error)))
        _trajectory.set(item.trajectory_id)
        puzzle = truth.countdown_target is not None and not truth.targets
        validation = self._countdown_validation if puzzle else self._validation
        score = to_proto(route.scorer(view, truth))
        return Judged(_reply(item, score, to_proto(validation.scorer(view, truth))), score, (view, truth))


def route_of(route: RewardRoute, rewards: Mapping[str, AnyReward], where: str) -> _Route:
    """The reward of a data source, ready to score; `where` names its setting in messages.

    Raises:
        SettingsError: it names an unknown reward or parameter.
    """
    if route.components is None:
        return _Route(route.name, guarded(route.name, registry.scorer(route.name, route.params, where, rewards)))
    parts = []
    for index, part in enumerate(route.components):
        bound = registry.scorer(part.name, part.params, f"{where}.components.{index}", rewards)
        parts.append(Part(part.label or part.name, part.weight, guarded(part.name, bound)))
    # The sum of finite parts may still be infinite, so it has a guard of its own.
    return _Route(route.title, guarded(route.title, composed(route.title, parts)))


def guarded(reward: str, scorer: Scorer) -> Scorer:
    """A scorer that never raises: what fails, or has no finite total, is INTERNAL."""
    failures = FAILURES.labels(reward)

    def score(view: TrajectoryView, truth: GroundTruth) -> Score:
        try:
            found = scorer(view, truth)
            if not math.isfinite(found.total):
                raise ArithmeticError(f"the total is {found.total}")
        except Exception as error:  # noqa: BLE001 - one faulty reward must not cost the batch its other scores
            failures.inc()
            get_logger().exception("reward_failed", reward=reward, trajectory=_trajectory.get())
            return refused(Status.INTERNAL, reward, f"{type(error).__name__}: {error}")
        return found

    return score


def _parts(route: RewardRoute) -> Sequence[RewardComponent | RewardRoute]:
    return route.components if route.components is not None else (route,)


def _refusal(item: reward_pb2.ScoreItem, why: Score) -> Judged:
    score = to_proto(why)
    return Judged(_reply(item, score, score), score, None)


def _reply(
    item: reward_pb2.ScoreItem, score: trajectory_pb2.Score, validation: trajectory_pb2.Score
) -> reward_pb2.ScoredItem:
    return reward_pb2.ScoredItem(trajectory_id=item.trajectory_id, score=score, validation_score=validation)
