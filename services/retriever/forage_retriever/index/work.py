"""An index in the making: a folder beside its place, with a checkpoint after each stage, that a killed process leaves
for the next one to go on with."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from forage_common.files import durable

_LOCK = "lock"
_POLL_S = 0.2
_KEPT_S = 7 * 24 * 3600.0
"""How long unfinished work that nobody goes on with is kept."""


class Work:
    """A held work folder: `index/` becomes the index; the other stages are only on the way to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = folder / "index"
        self.index.mkdir(exist_ok=True)

    def stage(
        self, name: str, key: str, make: Callable[[Path], None], aside: bool = False, goes_on: bool = False
    ) -> Path:
        """A folder that `make` filled, now or, from the same key, before a kill.

        Args:
            aside: it is no part of the index.
            goes_on: `make` itself goes on with what a killed process left in the folder; else it gets an empty one.
        """
        folder = (self.folder if aside else self.index) / name
        if not self.has(name, key):
            if not goes_on:
                self.drop(name)
            folder.mkdir(exist_ok=goes_on)
            make(folder)
            durable.sync_tree(folder)
            durable.write_atomically(self._mark(name), key)
        return folder

    def has(self, name: str, key: str) -> bool:
        """Whether a stage was finished from this key."""
        mark = self._mark(name)
        return mark.is_file() and mark.read_text() == key

    def drop(self, name: str) -> None:
        """Forget a stage and what it made."""
        self._mark(name).unlink(missing_ok=True)
        for parent in (self.folder, self.index):
            shutil.rmtree(parent / name, ignore_errors=True)

    def finish(self, final: Path) -> None:
        """Put the index into its place; what else is here goes."""
        durable.sync(self.index)
        self.index.chmod(0o755)
        self.index.rename(final)
        durable.sync(final.parent)
        self.discard()

    def discard(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _mark(self, name: str) -> Path:
        return self.folder / f"{name}.done"


@contextlib.contextmanager
def held(folder: Path, final: Path, waits: Callable[[], None]) -> Iterator[Work | None]:
    """The work towards `final`, for this process alone; None when `final` is there, perhaps because the process that
    was waited for has made it. `waits` is called once if another process has the work: it ends when that one does.

    Raises:
        OSError: the folder cannot be written.
    """
    lock = _acquired(folder, final, waits)
    if lock is None:
        _remove_leftover(folder)
        yield None
        return
    with lock:
        yield Work(folder)


def _acquired(folder: Path, final: Path, waits: Callable[[], None]) -> IO[str] | None:
    told = False
    while not final.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (
            contextlib.ExitStack() as closing,
            contextlib.suppress(FileNotFoundError),
        ):  # its holder has just removed it
            lock = closing.enter_context((folder / _LOCK).open("a"))
            if not _locked(lock):
                if not told:
                    waits()
                    told = True
                time.sleep(_POLL_S)
            elif _is_at(lock, folder / _LOCK) and not final.exists():
                closing.pop_all()
                return lock
    return None


def sweep(parent: Path, prefix: str) -> None:
    """Remove work that nobody holds and nobody has gone on with for a week."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if time.time() - max(path.stat().st_mtime for path in folder.iterdir()) > _KEPT_S:
                _remove_leftover(folder)


def _remove_leftover(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / _LOCK).open("r+") as lock:
        if _locked(lock) and _is_at(lock, folder / _LOCK):
            shutil.rmtree(folder)


def _locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(lock: IO[str], path: Path) -> bool:
    """Whether the file that was locked is still the one of this name: its folder may have been removed meanwhile."""
    try:
        return os.fstat(lock.fileno()).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False
