"""Processor time that each part of the service takes in a pass, beside that of an engine without the service."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

# Titles of processes, the first that fits.
_PARTS = (
    (re.compile("EngineCore"), "vLLM's process"),
    (re.compile(r"ray::ServeReplica:[^:]*:Engine\b|in_process\.py"), "engine replica, or its stand-in"),
    (re.compile(r"ray::ServeReplica:[^:]*:Agent\b"), "agents"),
    (re.compile(r"ray::ServeReplica:[^:]*:Dispatcher\b"), "dispatchers"),
    (re.compile(r"^ray::|raylet|gcs_server|/ray/"), "Ray's own"),
    (re.compile(r"forage_reward|reward/"), "reward"),
    (re.compile("redis-server"), "Redis"),
    (re.compile("forage_rollout"), "main process"),
)
BENCH = "trainer's end of the streams, retriever's stand-in"


@dataclass
class ProcessorTime:
    """Seconds of processor time by way and part, and the trajectories that they were for."""

    _seconds: dict[str, Counter[str]] = field(default_factory=dict)
    _trajectories: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def measure(self, way: str, trajectories: int) -> Iterator[None]:
        """Add what the processes of this benchmark take until the block ends."""
        before = _read()
        yield
        spent = self._seconds.setdefault(way, Counter())
        for part, seconds in _read().items():
            spent[part] += seconds - before[part]
        self._trajectories[way] += trajectories

    def summarize(self) -> dict[str, dict[str, float]]:
        """Way → part → milliseconds a trajectory, those that took a twentieth of one at least."""
        return {
            way: {
                part: ms
                for part, seconds in spent.most_common()
                if (ms := 1000 * seconds / self._trajectories[way]) >= 0.05
            }
            for way, spent in self._seconds.items()
        }


def _read() -> Counter[str]:
    """Seconds by part. What a process took that has ended meanwhile is lost; those of a pass last longer."""
    own, spent = psutil.Process(), Counter[str]()
    for process in (own, *own.children(recursive=True)):
        try:
            times, title = process.cpu_times(), " ".join(process.cmdline())
        except psutil.Error:
            continue
        part = BENCH if process == own else next((name for fits, name in _PARTS if fits.search(title)), "other")
        spent[part] += times.user + times.system
    return spent
