"""Scores items by the reward of their data source. Bad items and failing rewards get a status, never a 0."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import Counter

from forage_common.settings import RewardRoute
from forage_common.telemetry import get_logger
from forage_common.v1 import reward_pb2
from forage_reward import registry
from forage_reward.reward import Scorer
from forage_reward.score import Score, Status, refused
from forage_reward.trajectory import GroundTruth, TrajectoryView
from forage_reward.wire import InvalidItemError, to_proto, truth_of, view_of

ITEMS = Counter("forage_reward_items_total", "Trajectories scored", ["reward", "status"])
FAILURES = Counter("forage_reward_failures_total", "Rewards that raised or gave no finite number", ["reward"])
VALIDATION = "em"
"""The reward that validation is measured by, with its default parameters."""


@dataclass(frozen=True)
class _Route:
    reward: str
    scorer: Scorer


class Judge:
    """The rewards of a run, ready to score. Without state, so any number of threads may share one.

    Raises:
        SettingsError: a route names an unknown reward or parameter.
    """

    def __init__(self, routes: Mapping[str, RewardRoute]) -> None:
        self._routes = {
            source: _Route(route.name, registry.scorer(route.name, route.params, f"reward.routes.{source}"))
            for source, route in routes.items()
        }
        self._validation = registry.scorer(VALIDATION, {}, "validation")
        self._sources: dict[str, list[str]] = {name: [] for name in registry.REWARDS}
        for source, route in self._routes.items():
            self._sources[route.reward].append(source)

    def data_sources(self, reward: str) -> list[str]:
        """The data sources that are routed to a reward."""
        return self._sources[reward]

    def score(self, item: reward_pb2.ScoreItem) -> reward_pb2.ScoredItem:
        """The training and the validation score of one trajectory. Never raises on an item's content."""
        route = self._routes.get(item.data_source)
        if route is None:
            known = ", ".join(sorted(self._routes)) or "none"
            detail = f"data source '{item.data_source}' has no route: add it to reward.routes (known: {known})"
            return _reply(item, refused(Status.INVALID_INPUT, "", detail))
        try:
            view, truth = view_of(item), truth_of(item)
        except InvalidItemError as error:
            return _reply(item, refused(Status.INVALID_INPUT, route.reward, str(error)))
        score = _guarded(item.trajectory_id, route.reward, route.scorer, view, truth)
        return _reply(item, score, _guarded(item.trajectory_id, VALIDATION, self._validation, view, truth))


def _guarded(trajectory: str, reward: str, scorer: Scorer, view: TrajectoryView, truth: GroundTruth) -> Score:
    try:
        score = scorer(view, truth)
        if not math.isfinite(score.total):
            raise ArithmeticError(f"the total is {score.total}")
    except Exception as error:  # noqa: BLE001 - one faulty reward must not cost the batch its other scores
        FAILURES.labels(reward).inc()
        get_logger().exception("reward_failed", reward=reward, trajectory=trajectory)
        return refused(Status.INTERNAL, reward, f"{type(error).__name__}: {error}")
    return score


def _reply(item: reward_pb2.ScoreItem, score: Score, validation: Score | None = None) -> reward_pb2.ScoredItem:
    ITEMS.labels(score.reward, score.status.value).inc()
    return reward_pb2.ScoredItem(
        trajectory_id=item.trajectory_id,
        score=to_proto(score),
        validation_score=to_proto(validation or score),
    )
