"""What an engine has done since it started."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class EngineCounts:
    """What an engine has done since it started, and (running, waiting, paused, out_of_service) how it stands."""

    requests: int = 0
    requests_in_flight: int = 0
    requests_running: int = 0
    requests_waiting: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    sampled_tokens: int = 0
    busy_seconds: float = 0.0
    policy_updates: int = 0
    policy_pause_seconds: float = 0.0
    policy_failures: int = 0
    adapter_loads: int = 0
    paused: int = 0
    out_of_service: int = 0


class Meter:
    """Keeps an engine's counts, and the time in which requests were in flight."""

    def __init__(self) -> None:
        self._counts = EngineCounts()
        self._looked = time.perf_counter()

    @property
    def counts(self) -> EngineCounts:
        """Up to date; the engine adds to them what only it knows."""
        before, self._looked = self._looked, time.perf_counter()
        if self._counts.requests_in_flight:
            self._counts.busy_seconds += self._looked - before
        return self._counts

    @contextmanager
    def request(self) -> Iterator[EngineCounts]:
        """A request that is in flight for the block."""
        counts = self.counts
        counts.requests += 1
        counts.requests_in_flight += 1
        try:
            yield counts
        finally:
            self.counts.requests_in_flight -= 1
