"""Which of many like events deserve a log line."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Sampler:
    """At most `per_minute` of each kind, the first ones of every minute. Thread-safe."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._lock = threading.Lock()
        self._taken: dict[str, tuple[float, int]] = {}

    def take(self, kind: str) -> bool:
        """Whether this event is one of the sample."""
        now = self._clock()
        with self._lock:
            since, taken = self._taken.get(kind, (now, 0))
            if now - since >= 60:
                since, taken = now, 0
            self._taken[kind] = (since, taken + 1)
            return taken < self._per_minute
