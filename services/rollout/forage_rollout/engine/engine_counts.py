"""Counts of an engine, as its metrics show them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class EngineCounts:
    """Totals since an engine started, and its present state (in flight, running, waiting, the cache, freed bytes,
    asleep, paused, out of service)."""

    requests: int = 0
    requests_in_flight: int = 0
    requests_running: int = 0
    requests_waiting: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    sampled_tokens: int = 0
    evictions: int = 0
    cache_tokens: int = 0
    cache_tokens_used: int = 0
    busy_seconds: float = 0.0
    policy_updates: int = 0
    policy_stage_seconds: float = 0.0
    policy_wait_seconds: float = 0.0
    policy_pause_seconds: float = 0.0
    policy_failures: int = 0
    adapter_loads: int = 0
    fresh_loads: int = 0
    canary_failures: int = 0
    canary_seconds: float = 0.0
    direct_transfers: int = 0
    direct_fallbacks: int = 0
    sleeps: int = 0
    asleep_seconds: float = 0.0
    freed_bytes: int = 0
    asleep: int = 0
    paused: int = 0
    out_of_service: int = 0


class Meter:
    """Keeps an engine's counts and measures the time in which requests are in flight."""

    def __init__(self) -> None:
        self._counts = EngineCounts()
        self._read_at = time.perf_counter()

    @property
    def counts(self) -> EngineCounts:
        """The counts as of now; the engine itself updates all but the requests and `busy_seconds`."""
        before, self._read_at = self._read_at, time.perf_counter()
        if self._counts.requests_in_flight:
            self._counts.busy_seconds += self._read_at - before
        return self._counts

    @contextmanager
    def track_request(self) -> Iterator[EngineCounts]:
        """Count a request, in flight inside the `with` block."""
        counts = self.counts
        counts.requests += 1
        counts.requests_in_flight += 1
        try:
            yield counts
        finally:
            self.counts.requests_in_flight -= 1
