"""Files that are either complete or not there: written aside, flushed to disk, renamed into place."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forage_common.files import durable
from forage_common.files.durable import PARTIAL_PREFIX


def write_text(path: Path, text: str) -> None:
    """Replace a file's text atomically and durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.write_atomically(path, text)


def write_json(path: Path, value: Any) -> None:
    """Replace a file by a JSON document, atomically and durably."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` when the block ends and vanishes when it raises.

    An existing `path` is replaced: until the last moment it stays what it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{PARTIAL_PREFIX}{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        durable.sync_tree(aside)
        old = _set_aside(path)
        aside.rename(path)
        durable.sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def remove(folder: Path) -> None:
    """Delete a folder, which at no moment is there in part under its own name. Nothing happens if it is not there."""
    shutil.rmtree(_set_aside(folder), ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Delete what a dead process was writing into `folder`."""
    for leftover in folder.glob(f"{PARTIAL_PREFIX}*"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _set_aside(folder: Path) -> Path:
    """Rename a folder, if it is there, to a leftover's name."""
    old = folder.with_name(f"{PARTIAL_PREFIX}old-{folder.name}")
    shutil.rmtree(old, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(old)
    return old
