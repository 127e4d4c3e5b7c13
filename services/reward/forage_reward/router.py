"""Scores items by the reward of their data source. Invalid items and failing rewards get a status, never a 0."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import Counter

from forage_proto.v1 import reward_pb2, trajectory_pb2
from forage_reward import registry
from forage_reward.composition import CompositionPart, compose_scorers
from forage_reward.reward import AnyReward, Scorer
from forage_reward.rewards import countdown
from forage_reward.rewards import math as math_reward
from forage_reward.score import Component, Score, Status, sum_components, withhold_score
from forage_reward.trajectory import GroundTruth, TrajectoryView
from forage_reward.wire import InvalidItemError, read_truth, read_view, to_proto
from forage_runtime.settings import RewardRoute
from forage_runtime.settings.reward import join_titles
from forage_runtime.telemetry.logs import get_logger

FAILURES = Counter(
    "forage_reward_failures_total", "Rewards that raised or returned a total that is not finite", ["reward"]
)
VALIDATION = "em"
"""The reward of validation, with its default parameters; its scores are always 1 or 0. For a countdown problem, which
has no accepted answers, it is `countdown` with 0 for a wrong equation. Where the route has `math`, it is whether math
found the answer equal, and exact match is beside it as a component: em ignores sign and decimal point."""

_trajectory: ContextVar[str] = ContextVar("trajectory", default="")


class RoutedScore(NamedTuple):
    """The reply for an item, the message of its training score (shared, see `to_proto`), and the inputs of the rewards;
    None for an invalid item."""

    reply: reward_pb2.ScoredItem
    score: trajectory_pb2.Score
    inputs: tuple[TrajectoryView, GroundTruth] | None


@dataclass(frozen=True)
class _Route:
    """equal: the component that says whether `math` found the answer equal; empty where the route has no `math`."""

    reward: str
    scorer: Scorer
    equal: str = ""


class RewardRouter:
    """The rewards of a run, ready to score. Thread-safe.

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
        self._routes = {
            source: resolve_route(route, self.rewards, f"{where}.{source}") for source, route in routes.items()
        }
        self._blocking = {
            source for source, route in routes.items() if any(self.rewards[part.name].blocking for part in route)
        }
        validation = registry.bind_reward(VALIDATION, {}, "validation")
        self._validation = guard_scorer(VALIDATION, validation)
        countdown_validation = registry.bind_reward(countdown.NAME, {"format_score": 0.0}, "validation")
        self._countdown_validation = guard_scorer(countdown.NAME, countdown_validation)

    def has_route(self, data_source: str) -> bool:
        """Whether a data source has a reward."""
        return data_source in self._routes

    def is_blocking(self, data_source: str) -> bool:
        """Whether the reward of a data source waits for another process or service."""
        return data_source in self._blocking

    def score(self, item: reward_pb2.ScoreItem) -> reward_pb2.ScoredItem:
        """Compute the training and the validation score of one trajectory. Never raises on an item's content."""
        return self.score_with_inputs(item).reply

    def score_with_inputs(self, item: reward_pb2.ScoreItem) -> RoutedScore:
        """Score as `score` does, and return the inputs of the rewards as well."""
        route = self._routes.get(item.data_source)
        if route is None:
            known = ", ".join(sorted(self._routes)) or "none"
            detail = f"data source '{item.data_source}' has no route: add it to reward.routes (known: {known})"
            return _build_refusal(item, withhold_score(Status.INVALID_INPUT, "", detail))
        try:
            view, truth = read_view(item), read_truth(item)
        except InvalidItemError as error:
            return _build_refusal(item, withhold_score(Status.INVALID_INPUT, route.reward, str(error)))
        _trajectory.set(item.trajectory_id)
        is_countdown = truth.countdown_target is not None and not truth.targets
        validate = self._countdown_validation if is_countdown else self._validation
        own, validation = route.scorer(view, truth), validate(view, truth)
        if route.equal and not is_countdown:
            validation = _validate_by_math(own, route.equal, validation)
        score = to_proto(own)
        return RoutedScore(_build_reply(item, score, to_proto(validation)), score, (view, truth))


def resolve_route(route: RewardRoute, rewards: Mapping[str, AnyReward], where: str) -> _Route:
    """Bind the reward of a data source; `where` names its setting in error messages.

    Raises:
        SettingsError: it names an unknown reward or parameter.
    """
    if len(route) == 1 and route[0].is_plain:
        (only,) = route
        scorer = registry.bind_reward(only.name, only.params, where, rewards)
        equal = math_reward.EQUAL if only.name == math_reward.NAME else ""
        return _Route(only.name, guard_scorer(only.name, scorer), equal)
    parts = []
    for index, part in enumerate(route):
        scorer = registry.bind_reward(part.name, part.params, f"{where}.{index}", rewards)
        parts.append(CompositionPart(part.title, part.weight, guard_scorer(part.name, scorer)))
    # The sum of finite parts can still be infinite, so it needs its own guard.
    titles = (part.title for part in route if part.name == math_reward.NAME)
    equal, whole = next((f"{title}.{math_reward.EQUAL}" for title in titles), ""), join_titles(route)
    return _Route(whole, guard_scorer(whole, compose_scorers(whole, parts)), equal)


def _validate_by_math(own: Score, equal: str, em: Score) -> Score:
    """The validation score of a route with `math`: what it found, which is not computed twice, with exact match beside.

    Args:
        own: the route's score; without a value the validation has none either.
        equal: the component with what `math` found; absent where the trajectory has no answer.
        em: the validation by exact match.
    """
    if own.status not in (Status.OK, Status.ABSTAIN):
        return own
    found = next((component.raw for component in own.components if component.name == equal), 0.0)
    components = Component(math_reward.EQUAL, found, found), Component(VALIDATION, em.total, 0.0)
    return sum_components(math_reward.NAME, components, "equal" if found else "not equal")


def guard_scorer(reward: str, scorer: Scorer) -> Scorer:
    """Wrap a scorer so that it never raises: an exception or a total that is not finite becomes INTERNAL."""
    failures = FAILURES.labels(reward)

    def score(view: TrajectoryView, truth: GroundTruth) -> Score:
        try:
            result = scorer(view, truth)
            if not math.isfinite(result.total):
                raise ArithmeticError(f"the total is {result.total}")
        except Exception as error:  # noqa: BLE001 - one faulty reward must not cost the batch its other scores
            failures.inc()
            get_logger().exception("reward_failed", reward=reward, trajectory=_trajectory.get())
            return withhold_score(Status.INTERNAL, reward, f"{type(error).__name__}: {error}")
        return result

    return score


def _build_refusal(item: reward_pb2.ScoreItem, result: Score) -> RoutedScore:
    score = to_proto(result)
    return RoutedScore(_build_reply(item, score, score), score, None)


def _build_reply(
    item: reward_pb2.ScoreItem, score: trajectory_pb2.Score, validation: trajectory_pb2.Score
) -> reward_pb2.ScoredItem:
    return reward_pb2.ScoredItem(trajectory_id=item.trajectory_id, score=score, validation_score=validation)
