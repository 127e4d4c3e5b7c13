"""What a simulated process sees of its machine: clocks, files, threads, chance.

Python's own functions are replaced for the time of a schedule, not the calls in the services: a call that the services
gain later runs on the virtual clock too, and no code of theirs knows of the simulation.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import shutil
import time
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import redis.retry

from forage_runtime.files.durable import PARTIAL_PREFIX
from simulation.storage import set_time
from simulation.world import Signal, World

Hook = Callable[[str, Callable[[], Any]], Any]
"""Called around every durable change of a file: (what it is, the change)."""
_PLENTY = 10**15
_OWNER = re.compile(rf"(?<={re.escape(PARTIAL_PREFIX)}).*?\.[0-9a-f]{{8}}-")
"""What names the writing process in the name of a temporary file; it differs from run to run."""


class Disk:
    """The disk of the machine. full_until: until when it takes no more data."""

    def __init__(self) -> None:
        self.full_until = 0.0


class _Event:
    """threading.Event on the virtual clock."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._signal = Signal()
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        self._world.set(self._signal)

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._world.wait(self._signal, timeout)
        return self._is_set


class _Lock:
    """threading.Lock on the virtual clock."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._freed = Signal()
        self._is_held = False

    def __enter__(self) -> None:
        while self._is_held:
            self._world.wait(self._freed)
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False
        self._world.set(self._freed)


class _Thread:
    """threading.Thread: a task of its process."""

    def __init__(self, world: World, target: Callable[..., None], args: tuple[Any, ...] = (), **_: Any) -> None:
        self._world = world
        self._result = _Result(world)
        self._body = lambda: self._result.run(target, *args)
        self._has_begun = False

    def start(self) -> None:
        process = self._world.process
        assert process is not None
        self._has_begun = True
        process.spawn(self._body)

    def is_alive(self) -> bool:
        return self._has_begun and not self._result.done()

    def join(self) -> None:
        self._result.result()


def _make_threading(world: World) -> Any:
    """The parts of `threading` that the services use."""
    return types.SimpleNamespace(
        Event=lambda: _Event(world), Lock=lambda: _Lock(world), Thread=lambda **named: _Thread(world, **named)
    )


class _Result:
    """The part of concurrent.futures.Future that the services use."""

    def __init__(self, world: World) -> None:
        self._done = _Event(world)
        self.value: Any = None
        self.error: Exception | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            self.value = function(*args)
        except Exception as error:  # noqa: BLE001 - handed on to whoever asks for the result
            self.error = error
        self._done.set()

    def done(self) -> bool:
        return self._done.is_set()

    def result(self) -> Any:
        self._done.wait()
        if self.error is not None:
            raise self.error
        return self.value


class _Threads:
    """The part of ThreadPoolExecutor that the services use: every call is a task of its own."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._results: list[_Result] = []

    def __enter__(self) -> _Threads:
        return self

    def __exit__(self, *_: object) -> None:
        self._world.check_alive()
        for result in self._results:
            result._done.wait()

    def submit(self, function: Callable[..., Any], *args: Any) -> _Result:
        process, result = self._world.process, _Result(self._world)
        assert process is not None
        process.spawn(lambda: result.run(function, *args))
        self._results.append(result)
        return result


@contextlib.contextmanager
def install(world: World, disk: Disk, on_change: Hook, others: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give the processes of a world their machine.

    others: what else is replaced: (owner, name, value).
    """
    from forage_queue.rollout import lease_watch
    from forage_queue.streams import client as stream_client
    from forage_queue.trainer import batcher, gpu_lease
    from forage_trainer import folder_digests
    from forage_trainer.checkpoints import checkpoint
    from forage_weights.trainer import publisher

    seeded = random.Random(world.random.random())
    real_usage, real_getpid = shutil.disk_usage, os.getpid

    def guard(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            world.check_alive()
            return real(*args, **named)

        return call

    def commit(name: str, real: Callable[..., Any], path: int) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            world.check_alive()
            target = Path(os.fsdecode(args[path]))
            is_partial = target.name.startswith(PARTIAL_PREFIX)
            if world.process is None or "dir_fd" in named or (is_partial and name == "delete"):
                return real(*args, **named)
            what = f"retire {Path(args[0]).name}" if is_partial else f"{name} {target.parent.name}/{target.name}"
            return on_change(_OWNER.sub("", what), lambda: change(target, *args, **named))

        def change(target: Path, *args: Any, **named: Any) -> Any:
            result = real(*args, **named)
            if name == "write" and target.is_dir():
                set_time(world, target)
            return result

        return call

    def fsync(handle: int) -> None:
        world.check_alive()
        if world.process is not None and disk.full_until > world.now:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def usage(folder: Any) -> Any:
        free = 0 if disk.full_until > world.now else _PLENTY
        return real_usage(folder)._replace(free=free)

    def getpid() -> int:
        return world.process.pid if world.process is not None else real_getpid()

    def kill(pid: int, number: int) -> None:
        if world.process is None or number:
            raise NotImplementedError("a simulated process only asks whether another lives")
        if pid not in world.processes or not world.processes[pid].is_alive:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))

    def monotonic() -> float:
        return 1000.0 + world.now

    def wall() -> float:
        return world.wall_offset + world.now

    def sleep(seconds: float) -> None:
        world.sleep(seconds)

    replaced: list[tuple[Any, str, Any]] = [
        (time, "monotonic", monotonic),
        (time, "perf_counter", monotonic),
        (time, "time", wall),
        (time, "time_ns", lambda: int(wall() * 1e9)),
        (time, "sleep", sleep),
        (redis.retry, "sleep", sleep),
        (os, "rename", commit("write", os.rename, 1)),
        (os, "replace", commit("write", os.replace, 1)),
        (os, "unlink", commit("delete", os.unlink, 0)),
        (os, "rmdir", guard(os.rmdir)),
        (os, "mkdir", guard(os.mkdir)),
        (os, "fsync", fsync),
        (os, "getpid", getpid),
        (os, "kill", kill),
        (os, "urandom", seeded.randbytes),
        (shutil, "disk_usage", usage),
        (stream_client, "ThreadPoolExecutor", lambda *_: _Threads(world)),
        (batcher, "ThreadPoolExecutor", lambda *_: _Threads(world)),
        (folder_digests, "ThreadPoolExecutor", lambda *_: _Threads(world)),
        (checkpoint, "ThreadPoolExecutor", lambda *_: _Threads(world)),
        (publisher, "ThreadPoolExecutor", lambda *_: _Threads(world)),
        (batcher, "threading", _make_threading(world)),
        (lease_watch, "threading", _make_threading(world)),
        (gpu_lease, "threading", _make_threading(world)),
        *others,
    ]
    state = random.getstate()
    random.seed(world.random.random())
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        try:
            yield
        finally:
            random.setstate(state)
