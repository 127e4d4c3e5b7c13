"""CPU time and memory of the processes of a run, by part, and what Redis says of itself."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import psutil

from forage_queue.streams.client import StreamClient

RAY = "ray"
CONTROL = ("redis", "reward", "dispatchers", "agents", "engines' wire", RAY)
"""Parts of a run. The others, the retriever's and the trainer's end of the streams, stand in for what is not here."""
_REPLICA = re.compile(r"ray::ServeReplica:[^:]*:(Dispatcher|Agent|Engine)")
_REPLICAS = {"Dispatcher": "dispatchers", "Agent": "agents", "Engine": "engines' wire"}


@dataclass(frozen=True)
class Reading:
    """Of all processes at one moment: part → CPU seconds so far, and bytes."""

    cpu_s: dict[str, float]
    memory: dict[str, int]


@dataclass
class Processes:
    """The processes of a run.

    Attributes:
        own: part of this process, whose children are the others.
        roots: part → process whose children belong to it too; those of Ray are told apart by their titles.
    """

    own: str
    roots: dict[str, psutil.Process]
    _parts: dict[psutil.Process, str] = field(default_factory=dict)

    def read(self) -> Reading:
        """Read them. A page that processes share counts once in all: the proportional set size."""
        cpu_s: dict[str, float] = {}
        memory: dict[str, int] = {}
        for part, process in self._list():
            try:
                times, used = process.cpu_times(), process.memory_full_info().pss
            except psutil.Error:  # it has ended
                continue
            cpu_s[part] = cpu_s.get(part, 0.0) + times.user + times.system
            memory[part] = memory.get(part, 0) + used
        return Reading(cpu_s, memory)

    def _list(self) -> Iterator[tuple[str, psutil.Process]]:
        yield self.own, psutil.Process()
        for root, first in self.roots.items():
            for process in [first, *first.children(recursive=True)]:
                yield root if root != RAY else self._parts.get(process) or self._find_part(process), process

    def _find_part(self, process: psutil.Process) -> str:
        """The part of a process of Ray. A worker gets its title when it becomes a replica."""
        try:
            found = _REPLICA.search(" ".join(process.cmdline()))
        except psutil.Error:
            found = None
        if found is None:
            return RAY
        part = self._parts[process] = _REPLICAS[found.group(1)]
        return part


@dataclass(frozen=True)
class RedisReading:
    """Commands that clients sent, and bytes, since the server's start; and its memory now."""

    commands: int
    bytes_in: int
    bytes_out: int
    memory: int


def read_redis(streams: StreamClient) -> RedisReading:
    """Ask the server. A script counts as one command, whatever it calls."""
    calls = 0
    for name, row in streams.read_server("commandstats").items():
        if name.removeprefix("cmdstat_") in ("fcall", "fcall_ro", "xreadgroup", "xautoclaim", "xclaim", "xread"):
            calls += row["calls"]
    stats, memory = streams.read_server("stats"), streams.read_server("memory")
    return RedisReading(calls, stats["total_net_input_bytes"], stats["total_net_output_bytes"], memory["used_memory"])


class Watch:
    """Calls something every so often in a thread, until the block ends; a failure there ends the block with it."""

    def __init__(self, interval_s: float, look: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._look = look
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._interval_s):
                self._look()
        except Exception as error:  # noqa: BLE001 - the block's end raises it
            self._error = error
