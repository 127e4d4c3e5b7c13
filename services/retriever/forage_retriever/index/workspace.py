"""The workspace of a build: a staging directory beside the final one, with a checkpoint after each stage, from which
another process resumes if this one is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from forage_retriever.artifacts import make_unwritable_error
from forage_retriever.index.progress import Report, format_seconds
from forage_retriever.search.row_files import read_progress
from forage_runtime.errors import DataError
from forage_runtime.files import durable
from forage_runtime.telemetry.waits import waiting

_PARTS = {
    "corpus": "passages",
    "whole": "passages",
    "statistics": "counted words",
    "bm25": "indexed words",
    "trained": "trained cells and codes",
    "checked": "checks of the FAISS file",
}
"""What a stage makes, for people, where its name does not say it."""

_LOCK = "lock"
_POLL_S = 0.2
_KEPT_S = 7 * 24 * 3600.0
"""How long an unfinished build that nobody resumes is kept."""


class Workspace:
    """A locked staging directory.

    Attributes:
        folder: the staging directory, with the temporary stages.
        index: the folder in it that becomes the index.
    """

    def __init__(self, folder: Path, tell: Callable[[str], None] = lambda sentence: None) -> None:
        """`tell` gets a sentence on all that is kept of a build that was interrupted."""
        self.folder = folder
        self.index = folder / "index"
        self.index.mkdir(exist_ok=True)
        self._tell = tell
        self._seen: set[str] = set()

    def stage(
        self, name: str, key: str, write: Callable[[Path], None], temporary: bool = False, resumable: bool = False
    ) -> Path:
        """A folder that `write` filled, now or, from the same key, before a kill.

        Args:
            temporary: it is no part of the index.
            resumable: `write` itself resumes from what a killed process left in the folder; else the folder is empty.
        """
        folder = (self.folder if temporary else self.index) / name
        marker = self._marker(name)
        kept, _, seconds = marker.read_text(encoding="utf-8").partition("\n") if marker.is_file() else ("", "", "")
        if kept == key:
            if name not in self._seen:
                self._seen.add(name)
                self._tell(f"resumed: the {_PARTS.get(name, name)} are complete{_format_saved(float(seconds or 0))}")
            return folder
        begun, before = time.monotonic(), 0.0
        if not resumable:
            self.drop(name)
        elif (progress := read_progress(folder, key)) is not None:
            before = progress.seconds
            self._tell(
                f"resumed: the {_PARTS.get(name, name)} continue at passage {progress.done:,} of {progress.of:,}"
                + _format_saved(before)
            )
        folder.mkdir(exist_ok=resumable)
        write(folder)
        # The marker must never be on disk before the files whose completeness it states.
        durable.sync_tree(folder)
        durable.write_atomically(marker, f"{key}\n{before + time.monotonic() - begun:.3f}")
        self._seen.add(name)
        return folder

    def drop(self, name: str) -> None:
        """Remove a stage and its marker; the marker first, so that no kill leaves one for a removed stage."""
        self._marker(name).unlink(missing_ok=True)
        for parent in (self.folder, self.index):
            shutil.rmtree(parent / name, ignore_errors=True)

    def finish(self, final: Path) -> None:
        """Rename the index to its final place and remove the rest."""
        durable.sync(self.index)
        self.index.chmod(0o755)
        self.index.rename(final)
        durable.sync(final.parent)
        self.discard()

    def discard(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _marker(self, name: str) -> Path:
        return self.folder / f"{name}.done"


@contextlib.contextmanager
def open_workspace(staging_dir: Path, final: Path, report: Report) -> Iterator[Workspace | None]:
    """`hold_workspace`, with its errors as the user's; a bad corpus discards the workspace, other errors keep it.

    Raises:
        UserError: the folder cannot be written.
    """

    def report_waiting() -> None:
        tell("waiting for another process that builds it")

    def tell(sentence: str) -> None:
        report(sentence, 0, None)

    try:
        with hold_workspace(
            staging_dir, final, report_waiting, lambda sentence: report(sentence, 0, None)
        ) as workspace:
            try:
                yield workspace
            except DataError:
                if workspace is not None:
                    workspace.discard()
                raise
    except OSError as error:
        raise make_unwritable_error(final.parent, error) from None


@contextlib.contextmanager
def hold_workspace(
    folder: Path,
    final: Path,
    report_waiting: Callable[[], None],
    tell: Callable[[str], None] = lambda sentence: None,
) -> Iterator[Workspace | None]:
    """The workspace of `final`, locked by this process; None if `final` exists, perhaps because the process that
    held the lock has built it. `report_waiting` is called once if another process holds the lock; `tell` is that of
    `Workspace`.

    Raises:
        OSError: the folder cannot be written.
    """
    lock = _acquire_lock(folder, final, report_waiting)
    if lock is None:
        _remove_leftover(folder)
        yield None
        return
    with lock:
        yield Workspace(folder, tell)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove staging directories that nobody holds and nobody has resumed for a week."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            # Another process may have made the folder and not yet written its first file.
            if time.time() - max(path.stat().st_mtime for path in list(folder.iterdir()) or [folder]) > _KEPT_S:
                _remove_leftover(folder)


def _acquire_lock(folder: Path, final: Path, report_waiting: Callable[[], None]) -> IO[str] | None:
    reported = False
    while not final.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:  # a file, or a folder that its holder removed between two looks of mkdir
            if folder.exists() and not folder.is_dir():
                raise
        with (
            contextlib.ExitStack() as closing,
            contextlib.suppress(FileNotFoundError),
        ):  # the holder has just removed it
            lock = closing.enter_context((folder / _LOCK).open("a", encoding="utf-8"))
            if not _try_lock(lock):
                if not reported:
                    report_waiting()
                    reported = True
                why = "a lock ends with its process"
                with waiting("the index to be built", on="another retriever", limit_s=None, why_unlimited=why):
                    time.sleep(_POLL_S)
            elif _is_at(lock, folder / _LOCK) and not final.exists():
                closing.pop_all()
                return lock
    return None


def _remove_leftover(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / _LOCK).open("r+", encoding="utf-8") as lock:
        if _try_lock(lock) and _is_at(lock, folder / _LOCK):
            shutil.rmtree(folder)


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(lock: IO[str], path: Path) -> bool:
    """Whether the locked file is still the one of this name: its folder may have been removed meanwhile."""
    try:
        return os.fstat(lock.fileno()).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _format_saved(seconds: float) -> str:
    return f" ({format_seconds(seconds)} of work kept)" if seconds >= 1 else ""
