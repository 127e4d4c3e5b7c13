"""Settings of the guards: which values of a training metric are refused, and what follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from pydantic import Field, field_validator

from forage_runtime.settings.base import Section

GuardAction = Literal["ignore", "warn", "stop", "rollback"]
"""Action of the trainer when a guard trips."""


class _Guard(NamedTuple):
    """A check of one metric after every optimizer step: its defaults, and which thresholds it takes."""

    action: GuardAction = "warn"
    threshold: float | None = None
    expected: str = "no threshold, this guard has none"
    is_valid: Callable[[float], bool] = lambda threshold: False


_GUARDS = {
    "non_finite": _Guard("rollback"),
    "grad_norm": _Guard("warn", 10.0, "a number above 1", lambda threshold: threshold > 1),
    "kl": _Guard("warn", 1.0, "a number above 0", lambda threshold: threshold > 0),
    "reward": _Guard("warn", 0.5, "a number above 0, at most 1", lambda threshold: 0 < threshold <= 1),
    "entropy": _Guard("warn", 0.01, "0 or a number above it", lambda threshold: threshold >= 0),
    "dead_groups": _Guard("warn", 0.9, "0 or a number above it, below 1", lambda threshold: 0 <= threshold < 1),
    "logprob": _Guard("warn", 0.2, "a number above 0", lambda threshold: threshold > 0),
    "collapse": _Guard("warn"),
}
"""docs/explanation/trainer.md#guards says what each of them checks."""
_ACTIONS: dict[str, GuardAction] = {name: guard.action for name, guard in _GUARDS.items()}
_THRESHOLDS = {name: guard.threshold for name, guard in _GUARDS.items() if guard.threshold is not None}


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
        for name, threshold in thresholds.items():
            if not _GUARDS[name].is_valid(threshold):
                raise ValueError(f"{name} is {threshold:g}: expected {_GUARDS[name].expected}")
        return _THRESHOLDS | thresholds


def _check_names(given: dict[str, GuardAction] | dict[str, float]) -> None:
    if unknown := next((name for name in given if name not in _GUARDS), None):
        raise ValueError(f"there is no guard {unknown!r}: expected {', '.join(_GUARDS)}")
