"""Room on disk and in memory, checked before it is needed: what is needed, what there is, what to do."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import psutil
from rich.filesize import decimal

from forage_common.errors import UserError
from forage_common.telemetry.logs import get_logger
from forage_retriever.search import memory

_UNPACKED = 4
"""Bytes of text in a byte of gzip or Parquet, about."""

_WORDS_SHARE = 0.9
"""Bytes of word index for a byte of passages, with what merging takes meanwhile."""

_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that this process may still take: of the machine, or of its container where that has less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        cached = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return free
    return min(free, limit - used + int(cached.get("inactive_file", 0)))


def check_build_memory(factory: str, dimension: int, passages: int) -> None:
    """
    Raises:
        UserError: building an index of this type takes more memory than there is.
    """
    needed = memory.needs(factory, dimension, passages).build_bytes
    if needed > (free := available_memory()):
        raise UserError(
            f"building {factory} over {passages} passages takes {decimal(needed)} of memory, of which"
            f" {decimal(free)} are free: {_cheaper(dimension, passages, free)}"
        )


def check_load_memory(factory: str, dimension: int, passages: int) -> None:
    """
    Raises:
        UserError: an index of this type does not fit; one that would be mapped from disk for want of memory is logged.
    """
    free = available_memory()
    needs = memory.needs(factory, dimension, passages)
    if needs.held_bytes > free:
        raise UserError(memory.sentence(factory, dimension, passages, free))
    if needs.ram_bytes > free:
        get_logger().warning("index_reads_from_disk", why=memory.sentence(factory, dimension, passages, free))


def check_disk(folder: Path, needed: int, what: str) -> None:
    """
    Raises:
        UserError: there is not room enough on the disk of a folder.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{what} need {decimal(needed)} on the disk of {folder.parent}, of which {decimal(free)} are free:"
            " free some, or build on another disk"
        )


def corpus_bytes(files: Sequence[Path]) -> int:
    """What passages take on disk, about."""
    return sum(file.stat().st_size * (1 if file.suffix == ".jsonl" else _UNPACKED) for file in files if file.exists())


def words_bytes(corpus: int) -> int:
    """What a word index takes on disk while it is built, about."""
    return int(corpus * _WORDS_SHARE)


def dense_bytes(factory: str, dimension: int, passages: int) -> int:
    """What a vector index takes on disk while it is built, its passages' vectors included."""
    return 4 * dimension * passages + memory.needs(factory, dimension, passages).disk_bytes


def used_bytes(folder: Path) -> int:
    """What files of a folder take on disk."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _cheaper(dimension: int, passages: int, free: int) -> str:
    fitting = [factory for factory, needs in memory.cheaper(dimension, passages, free) if needs.build_bytes <= free]
    smaller = f"use retriever.faiss_factory={fitting[0]}, which would fit, or" if fitting else "use"
    return f"{smaller} shards (`forage index build --shards`)"
