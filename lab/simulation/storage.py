"""Where policies lie in a simulated run: an object store, caches with locks, and threads that do their work at once."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

from simulation.world import Process, World

PROTOCOL = "simulated"
Hook = Callable[[str, Callable[[], Any]], Any]
"""Called around every change: (what it is, the change)."""
_FIRST_HANDLE = 1_000_000
_POLL_S = 0.5


class ObjectStore:
    """Files by their addresses. down_until: until when it cannot be reached."""

    def __init__(self, world: World, draw_seconds: Callable[[str], float]) -> None:
        self.files: dict[str, bytes] = {}
        self.altered: set[str] = set()
        """Addresses that a fault has altered or deleted, here or on a disk."""
        self.down_until = 0.0
        self.on_change: Hook = lambda _, change: change()
        self._world = world
        self._draw_seconds = draw_seconds

    def transfer(self) -> None:
        """Let the time of a transfer pass."""
        self._world.sleep(self._draw_seconds("transfer"))
        self.reach()

    def reach(self) -> None:
        """
        Raises:
            ConnectionError: the store cannot be reached.
        """
        self._world.check_alive()
        if self.down_until > self._world.now:
            raise ConnectionError("no connection")

    def put(self, address: str, data: bytes) -> None:
        """Add or replace a file."""
        self.files[address] = data
        self.altered.discard(address)

    def change(self, what: str, address: str, change: Callable[[], Any]) -> None:
        """Add or delete a file."""
        self._world.check_alive()
        self.on_change(f"{what} {'/'.join(address.split('/')[-2:])}", change)


class _FileSystem(AbstractFileSystem):
    """The object store of the schedule that runs, as fsspec shows it."""

    protocol = PROTOCOL
    cachable = False
    current: ObjectStore

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        self.current.transfer()
        begin = path.rstrip("/") + "/"
        found: dict[str, dict[str, Any]] = {}
        for name, data in self.current.files.items():
            if name.startswith(begin):
                first, is_folder, _ = name.removeprefix(begin).partition("/")
                kind = "directory" if is_folder else "file"
                found[begin + first] = {"name": begin + first, "size": len(data), "type": kind}
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else list(found)

    def size(self, path: str) -> int:
        self.current.reach()
        return len(self._get(path))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self.current.reach()
        return self._get(path)[start:end]

    def put_file(self, lpath: str, rpath: str, *_: Any, **__: Any) -> None:
        data = Path(lpath).read_bytes()
        self.current.transfer()
        self.current.change("write", rpath, lambda: self.current.put(rpath, data))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self.current.transfer()
        self.current.change("write", path, lambda: self.current.put(path, value))

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self.current.transfer()
        for name in [name for name in self.current.files if name.startswith(path.rstrip("/") + "/")]:
            # A second process may have deleted it.
            self.current.change("delete", name, lambda name=name: self.current.files.pop(name, None))

    def rm_file(self, path: str) -> None:
        self.current.transfer()
        self.current.change("delete", path, lambda: self.current.files.pop(path, None))

    def _get(self, path: str) -> bytes:
        if path not in self.current.files:
            raise FileNotFoundError(path)
        return self.current.files[path]


fsspec.register_implementation(PROTOCOL, _FileSystem, clobber=True)


class _Locks:
    """`os` and `fcntl` of the cache: what a dead process had open is closed, as its kernel does.

    All simulated processes have one table of handles, so theirs have numbers of their own.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: dict[int, tuple[Process | None, int]] = {}
        self._count = _FIRST_HANDLE

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        self._world.check_alive()
        self._count += 1
        self._open[self._count] = self._world.process, os.open(path, flags, mode)
        return self._count

    def close(self, handle: int) -> None:
        if handle in self._open:
            os.close(self._open.pop(handle)[1])

    def close_all(self) -> None:
        for handle in list(self._open):
            self.close(handle)

    def fstat(self, handle: int) -> os.stat_result:
        return os.fstat(self._open[handle][1])

    def utime(self, path: Any) -> None:
        set_time(self._world, path)

    def flock(self, handle: int, operation: int) -> None:
        self._world.check_alive()
        for other, (process, _) in list(self._open.items()):
            if process is not None and not process.is_alive:
                self.close(other)
        fcntl.flock(self._open[handle][1], operation)


class _Delegate:
    """A module, of which some functions are replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _AtOnce:
    """The part of ThreadPoolExecutor that policies are written and patched with."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _AtOnce:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        value = function(*args)
        return SimpleNamespace(result=lambda: value)

    def map(self, function: Callable[..., Any], *items: Iterable[Any]) -> Any:
        return map(function, *items)

    def shutdown(self, **_: Any) -> None:
        pass


def set_time(world: World, path: Any) -> None:
    """Set the times of a file to the virtual clock, whose order the cache goes by."""
    now = int((world.wall_offset + world.now) * 1e9)
    os.utime(path, ns=(now, now))


def list_replaced(
    world: World, store: ObjectStore, is_full: Callable[[], bool], draw_seconds: Callable[[str], float]
) -> tuple[list[tuple[Any, str, Any]], Callable[[], None]]:
    """What is replaced for the time of a schedule: (owner, name, value); and what ends the replacement."""
    from forage_weights import announcement, cache, delta, storage
    from forage_weights.trainer import model_files, publisher

    _FileSystem.current = store
    locks = _Locks(world)
    real_fallocate = os.posix_fallocate

    def allocate(handle: int, offset: int, length: int) -> None:
        world.check_alive()
        if world.process is not None and is_full():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_fallocate(handle, offset, length)

    def map_in_turn(work: Callable[[Any], Any], items: Iterable[Any], _threads: int) -> list[Any]:
        return [work(item) for item in items]

    def take_time(what: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            world.sleep(draw_seconds(what))
            return real(*args, **named)

        return call

    replaced: list[tuple[Any, str, Any]] = [
        (os, "posix_fallocate", allocate),
        (delta, "ThreadPoolExecutor", _AtOnce),
        (model_files, "ThreadPoolExecutor", _AtOnce),
        (cache, "os", _Delegate(os, open=locks.open, close=locks.close, fstat=locks.fstat, utime=locks.utime)),
        (cache, "fcntl", _Delegate(fcntl, flock=locks.flock)),
        (cache, "_POLL_S", _POLL_S),
        (cache, "get_file", take_time("transfer", cache.get_file)),
        (cache, "patch_files", take_time("patch", cache.patch_files)),
        (publisher, "encode_delta", take_time("write", publisher.encode_delta)),
        (publisher, "write_model_folder", take_time("write", publisher.write_model_folder)),
    ]
    replaced += [(module, "map_parallel", map_in_turn) for module in (announcement, cache, delta, storage)]
    return replaced, locks.close_all
