"""Files that are whole or not there, and stay after a power cut."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

PARTIAL_PREFIX = ".partial-"
"""Prefix of what is being written; a leftover belongs to a process that died and may be removed."""


def write_atomically(file: Path, text: str) -> None:
    """Write a small file in one step."""
    aside = file.with_name(f"{PARTIAL_PREFIX}{file.name}")
    with aside.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(file)
    sync(file.parent)


def sync(path: Path) -> None:
    """Have the disk keep a file's content, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """`sync` everything in a folder."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file that is never written again a second name; copies it where file systems differ."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
