"""Tells whether a file has been replaced or rewritten."""

from __future__ import annotations

from pathlib import Path

Stamp = tuple[int, int, int]


def read_stamp(file: Path) -> Stamp:
    """Time, size and inode: a change of the contents changes one of them.

    Raises:
        OSError: there is no such file.
    """
    stat = file.stat()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
