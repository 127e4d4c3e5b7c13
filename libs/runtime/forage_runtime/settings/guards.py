"""Settings of the guards: which values of a training metric are refused, and what follows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from pydantic import Field, field_validator

from forage_runtime.settings.base import Number, Section

GuardAction = Literal["ignore", "warn", "stop", "rollback"]
"""Action of the trainer when a guard trips."""


class _Guard(NamedTuple):
    """A check of one metric after every optimizer step: its defaults, and which thresholds it takes."""

    action: GuardAction
    threshold: Number | None = None


_GUARDS = {
    "non_finite": _Guard("rollback"),
    "grad_norm": _Guard("warn", Number(10.0, "a number above 1", lambda number: number > 1)),
    "kl": _Guard("warn", Number(1.0, "a number above 0", lambda number: number > 0)),
    "reward": _Guard("warn", Number(0.5, "a number above 0, at most 1", lambda number: 0 < number <= 1)),
    "entropy": _Guard("warn", Number(0.01, "a number from 0", lambda number: number >= 0)),
    "dead_groups": _Guard("warn", Number(0.9, "a number from 0, below 1", lambda number: 0 <= number < 1)),
    "logprob": _Guard("warn", Number(0.2, "a number above 0", lambda number: number > 0)),
    "collapse": _Guard("warn"),
}
"""docs/explanation/trainer.md#guards says what each of them checks."""
_ACTIONS: dict[str, GuardAction] = {name: guard.action for name, guard in _GUARDS.items()}
_THRESHOLDS = {name: guard.threshold.default or 0.0 for name, guard in _GUARDS.items() if guard.threshold}


class GuardSettings(Section):
    """Guards on the metrics of every optimizer step; those that a map leaves out keep their defaults."""

    max_rollbacks: int = Field(3, ge=0, description="Rollbacks of a run; the next one stops the run instead")
    actions: dict[str, GuardAction] = Field(
        default_factory=_ACTIONS.copy,
        description="Guard → reaction when it trips: ignore, log a warning, stop the run, or rollback to a checkpoint",
    )
    thresholds: dict[str, float] = Field(
        default_factory=_THRESHOLDS.copy,
        description="Guard → value of its metric above which it trips (entropy, reward: below which)",
    )

    @field_validator("actions")
    @classmethod
    def _complete_actions(cls, actions: dict[str, GuardAction]) -> dict[str, GuardAction]:
        _check_names(actions)
        return _ACTIONS | actions

    @field_validator("thresholds")
    @classmethod
    def _complete_thresholds(cls, thresholds: dict[str, float]) -> dict[str, float]:
        _check_names(thresholds)
        for name, value in thresholds.items():
            threshold = _GUARDS[name].threshold
            if threshold is None:
                raise ValueError(f"{name} is {value:g}: expected none, this guard has no threshold")
            threshold.check(name, value)
        return _THRESHOLDS | thresholds


def _check_names(given: Iterable[str]) -> None:
    if unknown := next((name for name in given if name not in _GUARDS), None):
        raise ValueError(f"there is no guard {unknown!r}: expected {', '.join(_GUARDS)}")
