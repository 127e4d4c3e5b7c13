"""Values of metrics' labels that come from data: few, short, and the same for the life of a process."""

from __future__ import annotations

import threading

OTHER = "other"
MAX_CHARS = 128


class LabelNames:
    """The first `limit` names that are asked for keep their name; further and longer ones are `OTHER`. Thread-safe.

    A time series is never forgotten, neither here nor by Prometheus for as long as it is scraped: a file in which every
    question has a source of its own would otherwise exhaust both.
    """

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: set[str] = set()

    def name(self, value: str) -> str:
        """The value for the label."""
        with self._lock:
            if value not in self._kept:
                if len(self._kept) >= self._limit or len(value) > MAX_CHARS:
                    return OTHER
                self._kept.add(value)
        return value
