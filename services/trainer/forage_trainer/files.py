"""Files and folders that are complete or absent: written under a temporary name, flushed to disk, then renamed."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from forage_runtime.files import durable
from forage_runtime.files.durable import PARTIAL_PREFIX
from forage_weights.digests import compute_digest, verify_digest

_MOST_READERS = 8
"""Files that are read at once: a disk of a GPU node has several times what one thread reads."""
RANK_DIGESTS = "digests_of_rank_"
_F = TypeVar("_F")
_R = TypeVar("_R")


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


def compute_digests(folder: Path) -> dict[str, str]:
    """Compute the digest of every file below a folder, by relative path. Several files are read at once.

    What other ranks have described (`describe_rank`) is not read again.
    """
    known: dict[str, str] = {}
    for described in folder.glob(f"{RANK_DIGESTS}*.json"):
        known |= json.loads(described.read_text(encoding="utf-8"))
        described.unlink()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [str(file.relative_to(folder)) for file in files]
    left = [name for name in names if name not in known]
    known |= zip(left, _map_files(lambda name: compute_digest(folder / name), left), strict=True)
    return {name: known[name] for name in names}


def describe_rank(folder: Path, rank: int) -> None:
    """Flush the files that a rank above 0 has written below a folder, and leave their digests there for rank 0.

    On a file system of several machines no other rank could flush them, and each reads its own from memory.
    """
    files = sorted(folder.rglob(f"*_rank_{rank}.*"))
    for file in files:
        durable.sync(file)
    digests = _map_files(compute_digest, files)
    named = {str(file.relative_to(folder)): digest for file, digest in zip(files, digests, strict=True)}
    durable.write_atomically(folder / f"{RANK_DIGESTS}{rank}.json", json.dumps(named))


def find_altered(folder: Path, digests: Mapping[str, str]) -> list[str]:
    """Find the files that are missing below a folder, or have another digest. Several files are read at once."""

    def is_intact(name: str) -> bool:
        return (folder / name).is_file() and verify_digest(folder / name, digests[name])

    return [name for name, is_it in zip(digests, _map_files(is_intact, digests), strict=True) if not is_it]


def _map_files(work: Callable[[_F], _R], files: Iterable[_F]) -> list[_R]:
    with ThreadPoolExecutor(_MOST_READERS, "digest") as threads:
        return [one.result() for one in [threads.submit(work, file) for file in files]]


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
