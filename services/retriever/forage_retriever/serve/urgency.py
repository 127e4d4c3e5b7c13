"""Which of the waiting requests is searched next: that of the longest trajectory, unless another has waited longer.

A trajectory that waits keeps its context in the engine's cache, or loses it and is read again: both cost more if it is
long. Each request is due at a time that is fixed when it arrives: its deadline, less a head start that grows with the
trajectory. Those due first are searched first, so a request is overtaken only by those that arrive within the
difference of the head starts, and none waits for ever. docs/explanation/retriever.md compares policies, with figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PATIENCE_S = 30.0
"""Wait that callers who name no deadline, or a later one, are taken to accept."""

HEAD_START_S = 6.0
"""For each doubling of the trajectory: 3,000 tokens are 15 s of waiting ahead of 300."""

HEAD_START_TOKENS = 256
"""Length from which a trajectory is long."""


@dataclass(frozen=True, slots=True)
class Urgency:
    """How soon a caller needs its answer; other servers' clients say neither.

    Attributes:
        context_tokens: length of the trajectory that waits for the answer; 0: unknown.
        timeout_s: seconds from the request on after which the caller gives up.
    """

    context_tokens: int = 0
    timeout_s: float = math.inf


PATIENT = Urgency()
"""Of a caller who says nothing."""


def compute_due(urgency: Urgency, now: float) -> float:
    """The time at which a request is due, on the clock of `now`, in seconds; earlier ones are searched first."""
    head_start = HEAD_START_S * math.log2(1 + urgency.context_tokens / HEAD_START_TOKENS)
    return now + min(PATIENCE_S, urgency.timeout_s) - head_start
