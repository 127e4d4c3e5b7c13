"""The deadline of the call in progress, for rewards that wait for a process or a service."""

from __future__ import annotations

import time
from contextvars import ContextVar

DEADLINE: ContextVar[float] = ContextVar("deadline", default=float("inf"))
"""Seconds of `time.monotonic`."""

_MARGIN_RATIO = 0.1
_MAX_MARGIN_S = 0.25


def compute_deadline(remaining_s: float | None) -> float:
    """Compute when to stop scoring: before the caller's own deadline, so that the reply still arrives in time."""
    if remaining_s is None:
        return float("inf")
    return time.monotonic() + remaining_s - min(_MAX_MARGIN_S, _MARGIN_RATIO * remaining_s)


def limit_to_deadline(limit_s: float) -> float:
    """Shorten a time limit to the time left for the call; never below 0."""
    return max(0.0, min(limit_s, DEADLINE.get() - time.monotonic()))
