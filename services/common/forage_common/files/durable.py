"""Durable files: never partially visible under their name, and still there after a power cut."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL_PREFIX = ".partial-"
"""Prefix of the name of a file or folder that is being written; a leftover of a dead process may be removed."""


def write_atomically(file: Path, text: str) -> None:
    """Write a small text file that is either old or new, never partial."""
    with stage_file(file) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def stage_file(file: Path) -> Iterator[Path]:
    """Yield a path beside `file` to write to; the result replaces `file` if the block succeeds, else it is removed."""
    partial = file.with_name(f"{PARTIAL_PREFIX}{file.name}")
    try:
        yield partial
        sync(partial)
        partial.replace(file)
        sync(file.parent)
    finally:
        partial.unlink(missing_ok=True)


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
