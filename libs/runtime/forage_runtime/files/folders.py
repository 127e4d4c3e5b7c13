"""Files and folders that are complete or absent: written under a temporary name, flushed to disk, then renamed."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forage_runtime.files import durable
from forage_runtime.files.durable import PARTIAL_PREFIX


def write_text(path: Path, text: str) -> None:
    """Replace a file's text atomically and durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.write_atomically(path, text)


def write_json(path: Path, value: Any) -> None:
    """Replace a file by a JSON document, atomically and durably."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def stage_folder(path: Path, confirm: Callable[[], object] = lambda: None) -> Iterator[Path]:
    """Yield an empty folder that becomes `path` when the block ends, and is deleted when the block raises.

    An existing `path` keeps its content until the new folder is complete.

    Args:
        confirm: called when everything is flushed, which may take minutes; raises where the folder must get no name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = durable.name_partial(path)
    shutil.rmtree(staging, ignore_errors=True)
    try:
        with durable.detect_full_disk(path):
            staging.mkdir()
            yield staging
            # The content must be on the disk before the name is: after a power failure the name promises all of it.
            durable.sync_tree(staging)
            confirm()
            old = _retire(path)
            staging.rename(path)
            durable.sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def remove_folder(folder: Path) -> None:
    """Delete a folder, if it exists. It is renamed first, so that it is never partially visible under its own name."""
    shutil.rmtree(_retire(folder), ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files and folders that dead processes left in `folder`; those of living ones stay."""
    for leftover in folder.glob(f"{PARTIAL_PREFIX}*"):
        if durable.is_abandoned(leftover):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def measure_folder(path: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _retire(folder: Path) -> Path:
    """Rename a folder, if it exists, to a temporary name."""
    old = durable.name_partial(folder.with_name(f"old-{folder.name}"))
    shutil.rmtree(old, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(old)
    return old
