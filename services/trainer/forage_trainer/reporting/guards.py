"""Guards: limits on a step's metrics. They only decide; the loop acts on the decision."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
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


class Guards:
    """Checks the metrics of every step, and keeps those of the last `window` steps.

    A metric without a value (absent, None or, except for loss and gradient, not finite) trips no guard and is not kept.
    """

    def __init__(self, settings: GuardSettings, window: int = WINDOW) -> None:
        self._settings = settings
        for name, guard in settings:
            if action := getattr(guard, "action", None):
                TRIPS.labels(name, action)  # exported as 0 from the start
        self._window = window
        self._norms: deque[float] = deque(maxlen=window)
        self._rewards: deque[float] = deque(maxlen=window)
        self._highest: float | None = None

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
        return {"norms": list(self._norms), "rewards": list(self._rewards), "highest": self._highest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._norms, self._rewards = deque(state["norms"], self._window), deque(state["rewards"], self._window)
        self._highest = state["highest"]

    def _find_trips(self, metrics: Mapping[str, Any], groups: int) -> Iterator[Trip]:
        limits = self._settings
        for name in ("loss", "grad_norm"):
            value = metrics.get(name)
            if value is not None and not math.isfinite(value):
                yield Trip("non_finite", limits.non_finite.action, f"{name} is {value}")
                break
        if reason := self._find_spike(_finite_value(metrics, "grad_norm")):
            yield Trip("grad_norm", limits.grad_norm.action, reason)
        if reason := self._find_collapse(_finite_value(metrics, "reward_mean")):
            yield Trip("reward", limits.reward.action, reason)
        kl = _finite_value(metrics, "kl_ref")
        if kl is not None and kl > limits.kl.threshold:
            yield Trip("kl", limits.kl.action, f"KL to the reference is {kl:.4g}, above {limits.kl.threshold:g}")
        entropy = _finite_value(metrics, "entropy")
        if entropy is not None and entropy < limits.entropy.threshold:
            yield Trip(
                "entropy", limits.entropy.action, f"entropy is {entropy:.4g}, below {limits.entropy.threshold:g}"
            )
        dead = (_finite_value(metrics, "dead_groups") or 0) + (_finite_value(metrics, "filtered_groups") or 0)
        if groups and dead / groups > limits.dead_groups.threshold:
            bound = f"above a share of {limits.dead_groups.threshold:g}"
            yield Trip("dead_groups", limits.dead_groups.action, f"{dead:g} of {groups} groups are unused, {bound}")
        difference = _finite_value(metrics, "logprob_diff_mean")
        if difference is not None and difference > limits.logprob.threshold:
            bound = f"above {limits.logprob.threshold:g}"
            reason = f"log-probabilities of trainer and engine differ by {difference:.4g}, {bound}"
            yield Trip("logprob", limits.logprob.action, reason)

    def _find_spike(self, norm: float | None) -> str | None:
        if norm is None:
            return None
        center = median(self._norms) if self._has_history(self._norms) else None
        self._norms.append(norm)
        factor = self._settings.grad_norm.threshold
        if center is None or norm <= factor * center:
            return None
        return f"gradient norm is {norm:.4g}, above {factor:g} times the median {center:.4g} of the steps before"

    def _find_collapse(self, reward: float | None) -> str | None:
        if reward is None:
            return None
        self._rewards.append(reward)
        if not self._has_history(self._rewards):
            return None
        mean, share = fmean(self._rewards), self._settings.reward.threshold
        self._highest = mean if self._highest is None else max(mean, self._highest)
        # Of a highest mean at or below zero no share can be lost.
        if self._highest <= 0 or mean >= (1 - share) * self._highest:
            return None
        return (
            f"mean reward of {len(self._rewards)} steps is {mean:.4g}, a loss of {share:g} of its {self._highest:.4g}"
        )

    def _has_history(self, history: deque[float]) -> bool:
        return 2 * len(history) >= self._window


def _finite_value(metrics: Mapping[str, Any], name: str) -> float | None:
    value = metrics.get(name)
    return float(value) if value is not None and math.isfinite(value) else None
