"""Durable files: never partially visible under their name, and still there after a power cut."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forage_runtime.errors import DiskFullError

FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""Numbers of the errors that mean a lack of room: of the disk, a quota, or the limit of a process."""
PARTIAL_PREFIX = ".partial-"
"""Prefix of the name of a file or folder that is being written; what `is_abandoned` may be removed."""
_HOST, _TOKEN = socket.gethostname(), secrets.token_hex(4)
_OWNER = re.compile(rf"{re.escape(PARTIAL_PREFIX)}(.+)\.(\d+)\.[0-9a-f]{{8}}-")
_SILENT_S = 3600.0
_SMALLEST_ROOM = 2**20


def name_partial(path: Path) -> Path:
    """Name what will become `path` while it is being written: beside it, and by no other process under that name."""
    return path.with_name(f"{PARTIAL_PREFIX}{_HOST}.{os.getpid()}.{_TOKEN}-{path.name}")


def is_abandoned(partial: Path) -> bool:
    """Whether the process that was writing this is dead, or on another machine and has been silent for an hour.

    What bears the id of this process is abandoned: it is of one before it that had the same id, as in a container that
    was started again, or of work that this process gave up.
    """
    owner = _OWNER.match(partial.name)
    if owner is None:  # of a version whose names had no owner
        return True
    if owner[1] != _HOST:
        with contextlib.suppress(FileNotFoundError):
            newest = max(path.stat().st_mtime for path in (partial, *partial.rglob("*")))
            return time.time() - newest > _SILENT_S
        return False
    if int(owner[2]) == os.getpid():
        return True
    with contextlib.suppress(PermissionError):
        try:
            os.kill(int(owner[2]), 0)
        except ProcessLookupError:
            return True
    return False


def write_atomically(file: Path, text: str) -> None:
    """Write a small text file that is either old or new, never partial."""
    with stage_file(file) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def stage_file(file: Path) -> Iterator[Path]:
    """Yield a path beside `file` to write to; the result replaces `file` if the block succeeds, else it is removed.

    Removes what dead processes left of the same file.
    """
    partial = name_partial(file)
    for leftover in file.parent.glob(f"{PARTIAL_PREFIX}*"):
        if leftover.name.endswith(f"-{file.name}") and leftover != partial and is_abandoned(leftover):
            leftover.unlink(missing_ok=True)
    try:
        with detect_full_disk(file):
            yield partial
            sync(partial)
            partial.replace(file)
            sync(file.parent)
    finally:
        partial.unlink(missing_ok=True)


def append(file: Path, data: bytes) -> None:
    """Append to a file durably: all or nothing.

    Raises:
        DiskFullError: there is no room.
    """
    is_new = not file.exists()
    with detect_full_disk(file), file.open("ab", buffering=0) as output:
        size = output.tell()
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[output.write(rest) :]
            os.fsync(output.fileno())
        except OSError:
            output.truncate(size)  # what follows must not continue a part
            raise
    if is_new:
        sync(file.parent)


def is_full(folder: Path) -> bool:
    """Whether the disk of a folder has no room to speak of."""
    return shutil.disk_usage(folder).free < _SMALLEST_ROOM


@contextmanager
def detect_full_disk(path: Path) -> Iterator[None]:
    """Turn what a full disk raises while `path` is written into a `DiskFullError` that names the path.

    PyTorch raises a `RuntimeError` that does not name its cause: the free space decides.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if not (error.errno in FULL if isinstance(error, OSError) else is_full(path.parent)):
            raise
        free = shutil.disk_usage(path.parent).free
        raise DiskFullError(f"{path} cannot be written: its disk has {free} bytes free: free some space") from error


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flush a folder and everything in it to the disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def link_or_copy(source: Path | str, target: Path | str) -> None:
    """Give a file that is never written again a second name; copy it across file systems."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
