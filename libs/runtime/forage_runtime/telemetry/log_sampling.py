"""Rate-limits log lines of similar events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class LogSampler:
    """Admits the first `per_minute` events of each kind in every minute. Thread-safe."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: dict[str, tuple[float, int]] = {}

    def admit(self, kind: str) -> bool:
        """Count an event; returns whether to log it."""
        now = self._clock()
        with self._lock:
            since, count = self._counts.get(kind, (now, 0))
            if now - since >= 60:
                since, count = now, 0
            self._counts[kind] = (since, count + 1)
            return count < self._per_minute
