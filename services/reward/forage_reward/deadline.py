"""How long the call in progress may still take, for rewards that wait for something."""

from __future__ import annotations

import time
from contextvars import ContextVar

DEADLINE: ContextVar[float] = ContextVar("deadline", default=float("inf"))
"""On the clock of `time.monotonic`."""

_MARGIN_OF_TOTAL = 0.1
_MAX_MARGIN_S = 0.25


def deadline_of(remaining_s: float | None) -> float:
    """When to stop scoring, so that the reply still reaches its caller: a little before the caller's own deadline."""
    if remaining_s is None:
        return float("inf")
    return time.monotonic() + remaining_s - min(_MAX_MARGIN_S, _MARGIN_OF_TOTAL * remaining_s)


def within(limit_s: float) -> float:
    """`limit_s`, or what is left of the call where that is less; never below 0."""
    return max(0.0, min(limit_s, DEADLINE.get() - time.monotonic()))
