"""Digests of all files of a folder, of which several ranks may have written parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from forage_runtime.files import durable
from forage_weights.digests import compute_digest, verify_digest

_MOST_READERS = 8
"""Files that are read at once: a disk of a GPU node has several times what one thread reads."""
RANK_DIGESTS = "digests_of_rank_"
_F = TypeVar("_F")
_R = TypeVar("_R")


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
