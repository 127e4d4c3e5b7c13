"""Guards: limits on a step's metrics. They only decide; the loop acts on the decision."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from prometheus_client import Counter

from forage_runtime.settings import GuardAction, GuardSettings

WINDOW = 20
"""Steps of history of the gradient norm and the reward, of which half must be there: a median forgives single spikes of
so many, and a mean of rewards moves by less than its threshold from batch to batch."""

_ORDER = ("rollback", "stop", "warn")
TRIPS = Counter("forage_trainer_guard_trips_total", "Steps that tripped a guard", ["guard", "action"])


@dataclass(frozen=True)
class Trip:
    """A guard that a step tripped. reason: a clause with the metric and its bound."""

    guard: str
    action: GuardAction
    reason: str


class Trend:
    """The level of one metric now, against its best level of the run so far.

    A level is the median of some values, so a single odd step is none. The best level is the best median of a window,
    not that of the steps just before, against which a slow drift would never show. It begins with half a window, and is
    not moved by the value that is compared with it.

    Args:
        window: steps.
        choose: returns the better one of two levels.
    """

    def __init__(self, window: int, choose: Callable[[float, float], float] = min) -> None:
        self._choose = choose
        self._recent = max(1, window // 4)
        self._values: deque[float] = deque(maxlen=window)
        self._best: float | None = None

    def add(self, value: float) -> tuple[float, float] | None:
        """Add the value of a step; returns level and best level, None as long as there are too few values."""
        best = self._best
        self._values.append(value)
        if 2 * len(self._values) >= (self._values.maxlen or 0):
            level = median(self._values)
            self._best = level if best is None else self._choose(best, level)
        return None if best is None else (median(list(self._values)[-self._recent :]), best)

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self._values), "best": self._best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._values.clear()
        self._values.extend(state["values"])
        self._best = state["best"]


@dataclass(frozen=True)
class _Sign:
    """How a metric tells of a collapse.

    Attributes:
        words: what has happened, before "from … to …".
        is_bad: takes level and best level, as of `Trend.add`.
        choose: as of `Trend`.
    """

    words: str
    is_bad: Callable[[float, float], bool]
    choose: Callable[[float, float], float] = min


def _rise(words: str, most: float) -> _Sign:
    """A level that rises by more than `most` above its lowest one."""
    return _Sign(f"{words} rose", lambda level, lowest: level - lowest > most)


_SIGNS = {
    "entropy": _rise("the entropy", 0.5),
    "repetition_rate": _rise("the share of repeated 8-grams", 0.1),
    "broken_tag_rate": _rise("the share of trajectories with broken tags", 0.15),
    "foreign_letter_rate": _rise("the share of letters in foreign scripts", 0.05),
    "max_searches_rate": _rise("the share of trajectories with all searches that rollout.max_turns allows", 0.3),
    # Healthy runs differ by about 0.01 nats; some models by more from the first step on.
    "logprob_diff_mean": _Sign(
        "log-probabilities of trainer and engine drift apart,", lambda level, lowest: level > max(0.03, 2.0 * lowest)
    ),
    "search_rate": _Sign(
        "the share of trajectories that search fell", lambda level, highest: level < 0.7 * highest, max
    ),
}
"""Signs of a collapse, by metric."""


class Guards:
    """Checks the metrics of every step, and keeps those of the last `window` steps.

    A metric without a value (absent, None or, except for loss and gradient, not finite) trips no guard and is not kept.
    """

    def __init__(self, settings: GuardSettings, window: int = WINDOW) -> None:
        self._settings = settings
        for name, action in settings.actions.items():
            TRIPS.labels(name, action)  # exported as 0 from the start
        self._window = window
        self._norms: deque[float] = deque(maxlen=window)
        self._rewards: deque[float] = deque(maxlen=window)
        self._highest: float | None = None
        self._trends = {name: Trend(window, sign.choose) for name, sign in _SIGNS.items()}

    def check(self, metrics: Mapping[str, Any], groups: int) -> list[Trip]:
        """Return the guards that a step trips, the one to act on first; each is counted.

        Args:
            metrics: of one step, by the names of the metrics file.
            groups: number of groups in its batch.
        """
        trips = [trip for trip in self._find_trips(metrics, groups) if trip.action != "ignore"]
        for trip in trips:
            TRIPS.labels(trip.guard, trip.action).inc()
        return sorted(trips, key=lambda trip: _ORDER.index(trip.action))

    def state_dict(self) -> dict[str, Any]:
        trends = {name: trend.state_dict() for name, trend in self._trends.items()}
        return {"norms": list(self._norms), "rewards": list(self._rewards), "highest": self._highest, "trends": trends}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._norms, self._rewards = deque(state["norms"], self._window), deque(state["rewards"], self._window)
        self._highest = state["highest"]
        for name, own in state.get("trends", {}).items():  # checkpoints of 0.1 have none
            self._trends[name].load_state_dict(own)

    def _find_trips(self, metrics: Mapping[str, Any], groups: int) -> Iterator[Trip]:
        for guard, reason in self._find_reasons(metrics, groups):
            yield Trip(guard, self._settings.actions[guard], reason)

    def _find_reasons(self, metrics: Mapping[str, Any], groups: int) -> Iterator[tuple[str, str]]:
        """The guards that trip, and why."""
        limits = self._settings.thresholds
        for name in ("loss", "grad_norm"):
            value = metrics.get(name)
            if value is not None and not math.isfinite(value):
                yield "non_finite", f"{name} is {value}"
                break
        if reason := self._find_spike(_finite_value(metrics, "grad_norm")):
            yield "grad_norm", reason
        if reason := self._find_collapse(_finite_value(metrics, "reward_mean")):
            yield "reward", reason
        kl = _finite_value(metrics, "kl_ref")
        if kl is not None and kl > limits["kl"]:
            yield "kl", f"KL to the reference is {kl:.4g}, above {limits['kl']:g}"
        entropy = _finite_value(metrics, "entropy")
        if entropy is not None and entropy < limits["entropy"]:
            yield "entropy", f"entropy is {entropy:.4g}, below {limits['entropy']:g}"
        dead = (_finite_value(metrics, "dead_groups") or 0) + (_finite_value(metrics, "filtered_groups") or 0)
        if groups and dead / groups > limits["dead_groups"]:
            bound = f"above a share of {limits['dead_groups']:g}"
            yield "dead_groups", f"{dead:g} of {groups} groups are unused, {bound}"
        difference = _finite_value(metrics, "logprob_diff_mean")
        if difference is not None and difference > limits["logprob"]:
            bound = f"above {limits['logprob']:g}"
            yield "logprob", f"log-probabilities of trainer and engine differ by {difference:.4g}, {bound}"
        if signs := list(self._find_signs(metrics)):
            yield "collapse", "; ".join(signs)

    def _find_spike(self, norm: float | None) -> str | None:
        if norm is None:
            return None
        center = median(self._norms) if self._has_history(self._norms) else None
        self._norms.append(norm)
        factor = self._settings.thresholds["grad_norm"]
        if center is None or norm <= factor * center:
            return None
        return f"gradient norm is {norm:.4g}, above {factor:g} times the median {center:.4g} of the steps before"

    def _find_collapse(self, reward: float | None) -> str | None:
        if reward is None:
            return None
        self._rewards.append(reward)
        if not self._has_history(self._rewards):
            return None
        mean, share = fmean(self._rewards), self._settings.thresholds["reward"]
        self._highest = mean if self._highest is None else max(mean, self._highest)
        # Of a highest mean at or below zero no share can be lost.
        if self._highest <= 0 or mean >= (1 - share) * self._highest:
            return None
        return (
            f"mean reward of {len(self._rewards)} steps is {mean:.4g}, a loss of {share:g} of its {self._highest:.4g}"
        )

    def _find_signs(self, metrics: Mapping[str, Any]) -> Iterator[str]:
        for name, sign in _SIGNS.items():
            value = _finite_value(metrics, name)
            levels = None if value is None else self._trends[name].add(value)
            if levels is not None and sign.is_bad(*levels):
                level, best = levels
                yield f"{sign.words} from {best:.4g} to {level:.4g}"

    def _has_history(self, history: deque[float]) -> bool:
        return 2 * len(history) >= self._window


def _finite_value(metrics: Mapping[str, Any], name: str) -> float | None:
    value = metrics.get(name)
    return float(value) if value is not None and math.isfinite(value) else None
