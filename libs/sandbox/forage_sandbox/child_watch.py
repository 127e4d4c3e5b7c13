"""Looks at processes of user code from outside, for what no limit of the kernel covers: work while nobody has asked for
any, threads, other processes' memory, and the size of the temporary folder."""

from __future__ import annotations

import contextlib
import os
import resource
import stat
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from forage_sandbox.confinement import MAX_TASKS, TEMPORARY_MIB

INTERVAL_S = 0.5
MAX_FILES = 10_000
IDLE_CPU_S = 10.0
"""Processor time beyond the time of calls, after which a process counts as one that works unasked."""
_IDLE_SHARE = 0.1
_TICKS = os.sysconf("SC_CLK_TCK")


class Watched:
    """One process: what it may use, and how long it was asked to work.

    Args:
        stop: called with the reason, once, when it uses more; kills it.
    """

    def __init__(self, pid: int, folder: Path, memory_mib: int, stop: Callable[[str], None]) -> None:
        self._pid = pid
        self._folder = folder
        self._memory_mib = memory_mib
        self._stop = stop
        self._calls = 0
        self._lock = threading.Lock()
        self._asked_s = 0.0
        self._begin = self._asked_since = time.monotonic()
        self._cpu_at_start_s: float | None = None

    def begin_call(self) -> None:
        """Between this and `end_call` it may work."""
        with self._lock:
            if not self._calls:
                self._asked_since = time.monotonic()
            self._calls += 1

    def end_call(self) -> None:
        with self._lock:
            self._calls -= 1
            if not self._calls:
                self._asked_s += time.monotonic() - self._asked_since

    def look(self) -> None:
        """Stop it where it uses more than it may."""
        if reason := self._find_excess():
            self._stop(reason)

    def give_up(self, error: Exception) -> None:
        """Stop it because it cannot be watched."""
        self._stop(f"it cannot be watched ({type(error).__name__}: {error})")

    def _find_excess(self) -> str:
        tasks, cpu_s, memory_mib, processes = _measure_group(self._pid)
        if tasks > MAX_TASKS:
            return f"it has {tasks} threads and processes, allowed are {MAX_TASKS}"
        if processes > 1 and memory_mib > self._memory_mib:
            return f"its processes use {memory_mib:.0f} MiB, memory_mib is {self._memory_mib}"
        try:
            files, size = _measure_folder(self._folder)
        except OSError as error:
            return f"its temporary folder has a part that cannot be looked at ({error.strerror})"
        size += _measure_unlinked(self._pid)
        if size > TEMPORARY_MIB * 2**20 or files > MAX_FILES:
            return f"its temporary folder has {files} files of {size / 2**20:.0f} MiB, allowed are {TEMPORARY_MIB} MiB"
        with self._lock:
            now = time.monotonic()
            asked_s = self._asked_s + (now - self._asked_since if self._calls else 0.0)
        if self._cpu_at_start_s is None:
            self._cpu_at_start_s = cpu_s
        idle_s = now - self._begin - asked_s
        cores = os.cpu_count() or 1
        if cpu_s - self._cpu_at_start_s > asked_s * cores + IDLE_CPU_S + _IDLE_SHARE * idle_s:
            return "it works while it is not asked to"
        return ""


_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def watch(watched: Watched) -> Watched:
    """Look at a process again and again until it is forgotten by its owner."""
    global _thread
    with _lock:
        _watched.add(watched)
        if _thread is None and os.path.isdir("/proc/self"):
            _thread = threading.Thread(target=_run, name="user-code-watch", daemon=True)
            _thread.start()
    return watched


def _run() -> None:
    while True:
        time.sleep(INTERVAL_S)  # wait: pause between two looks
        with _lock:
            everyone = list(_watched)
        for one in everyone:
            try:
                one.look()
            except Exception as error:  # noqa: BLE001 - what cannot be watched must not run, and the others go on
                one.give_up(error)


def _measure_group(pid: int) -> tuple[int, float, float, int]:
    """Threads, processor seconds, resident MiB and number of the processes of a group."""
    tasks, ticks, pages, processes = 0, 0, 0, 0
    for name in _list_group(pid):
        try:
            # Bytes: its name, which it gives itself, need not be a text.
            fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == pid:
            ticks += int(fields[11]) + int(fields[12])
            tasks += int(fields[17])
            pages += int(fields[21])
            processes += 1
    return tasks, ticks / _TICKS, pages * resource.getpagesize() / 2**20, processes


def _list_group(pid: int) -> list[str]:
    """The process and those that it, and they, have started."""
    found: list[str] = []
    new = [str(pid)]
    while new and len(found) <= MAX_TASKS:
        name = new.pop()
        found.append(name)
        try:
            for task in os.listdir(f"/proc/{name}/task"):
                new += Path(f"/proc/{name}/task/{task}/children").read_text(encoding="utf-8").split()
        except OSError:
            continue
    return found


def _measure_folder(folder: Path) -> tuple[int, int]:
    """Files, and bytes on disk, below a folder; stops counting where there are too many.

    Raises:
        OSError: a part of it cannot be read: too deep, or closed by its owner.
    """
    files, size = 0, 0
    todo = [os.fspath(folder)]
    while todo and files <= MAX_FILES:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    files += 1
                    if files > MAX_FILES:
                        break
                    with contextlib.suppress(FileNotFoundError):
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            todo.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):  # it works while it is looked at
            continue
    return files, size


def _measure_unlinked(pid: int) -> int:
    """Bytes on disk of the files that have no name any more, and that a process, or one that it started, has open."""
    sizes: dict[tuple[int, int], int] = {}
    for name in _list_group(pid):
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{name}/fd"):
                with contextlib.suppress(OSError):
                    found = os.stat(f"/proc/{name}/fd/{descriptor}")
                    if not found.st_nlink and stat.S_ISREG(found.st_mode):
                        sizes[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())
