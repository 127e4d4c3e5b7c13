"""Durable files: never partially visible under their name, and still there after a power cut."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

PARTIAL_PREFIX = ".partial-"
"""Prefix of the name of a file or folder that is being written; a leftover of a dead process may be removed."""


def write_atomically(file: Path, text: str) -> None:
    """Write a small text file that is either old or new, never partial."""
    temporary = file.with_name(f"{PARTIAL_PREFIX}{file.name}")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
    sync(file.parent)


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


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file that is never written again a second name; copy it across file systems."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
