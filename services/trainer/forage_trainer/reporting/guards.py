"""Guards: what a step's figures must not be. Decisions only; the loop acts on them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from forage_common.settings import GuardAction, GuardSettings

_ORDER = (GuardAction.ROLLBACK, GuardAction.STOP, GuardAction.WARN)


@dataclass(frozen=True)
class Trip:
    """A guard that a step set off. reason: a clause with the figure and its bound."""

    guard: str
    action: GuardAction
    reason: str


class Guards:
    """Looks at every step's figures and remembers those of the last `window` steps.

    A figure that a step does not have (absent, None or, but for loss and gradient, not finite) sets nothing off and is
    not remembered.
    """

    def __init__(self, settings: GuardSettings) -> None:
        self._settings = settings
        self._norms: deque[float] = deque(maxlen=settings.window)
        self._rewards: deque[float] = deque(maxlen=settings.window)
        self._highest: float | None = None

    def check(self, figures: Mapping[str, Any], groups: int) -> list[Trip]:
        """The guards that a step sets off, the one to act on first.

        Args:
            figures: of one step, by the names of the metrics file.
            groups: in its batch.
        """
        found = [trip for trip in self._trips(figures, groups) if trip.action is not GuardAction.IGNORE]
        return sorted(found, key=lambda trip: _ORDER.index(trip.action))

    def state_dict(self) -> dict[str, Any]:
        return {"norms": list(self._norms), "rewards": list(self._rewards), "highest": self._highest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        window = self._settings.window
        self._norms, self._rewards = deque(state["norms"], window), deque(state["rewards"], window)
        self._highest = state["highest"]

    def _trips(self, figures: Mapping[str, Any], groups: int) -> Iterator[Trip]:
        to = self._settings
        for name in ("loss", "grad_norm"):
            value = figures.get(name)
            if value is not None and not math.isfinite(value):
                yield Trip("non_finite", to.non_finite.action, f"{name} is {value}")
                break
        if reason := self._spike(_number(figures, "grad_norm")):
            yield Trip("grad_norm", to.grad_norm.action, reason)
        if reason := self._collapse(_number(figures, "reward_mean")):
            yield Trip("reward", to.reward.action, reason)
        kl = _number(figures, "kl_ref")
        if kl is not None and kl > to.kl.threshold:
            yield Trip("kl", to.kl.action, f"KL to the reference is {kl:.4g}, above {to.kl.threshold:g}")
        entropy = _number(figures, "entropy")
        if entropy is not None and entropy < to.entropy.threshold:
            yield Trip("entropy", to.entropy.action, f"entropy is {entropy:.4g}, below {to.entropy.threshold:g}")
        dead = (_number(figures, "dead_groups") or 0) + (_number(figures, "filtered_groups") or 0)
        if groups and dead / groups > to.dead_groups.threshold:
            bound = f"above a share of {to.dead_groups.threshold:g}"
            yield Trip("dead_groups", to.dead_groups.action, f"{dead:g} of {groups} groups teach nothing, {bound}")
        apart = _number(figures, "logprob_diff_mean")
        if apart is not None and apart > to.logprob.threshold:
            reason = f"log-probabilities of trainer and engine differ by {apart:.4g}, above {to.logprob.threshold:g}"
            yield Trip("logprob", to.logprob.action, reason)

    def _spike(self, norm: float | None) -> str | None:
        if norm is None:
            return None
        usual = median(self._norms) if self._seen(self._norms) else None
        self._norms.append(norm)
        factor = self._settings.grad_norm.threshold
        if usual is None or norm <= factor * usual:
            return None
        return f"gradient norm is {norm:.4g}, above {factor:g} times the median {usual:.4g} of the steps before"

    def _collapse(self, reward: float | None) -> str | None:
        if reward is None:
            return None
        self._rewards.append(reward)
        if not self._seen(self._rewards):
            return None
        now, lost = fmean(self._rewards), self._settings.reward.threshold
        self._highest = now if self._highest is None else max(now, self._highest)
        # Below or at zero there is no share to lose.
        if self._highest <= 0 or now >= (1 - lost) * self._highest:
            return None
        return f"mean reward of {len(self._rewards)} steps is {now:.4g}, which lost {lost:g} of its {self._highest:.4g}"

    def _seen(self, history: deque[float]) -> bool:
        return 2 * len(history) >= self._settings.window


def _number(figures: Mapping[str, Any], name: str) -> float | None:
    value = figures.get(name)
    return float(value) if value is not None and math.isfinite(value) else None
