"""Disk and memory, checked before they are needed; errors say what is needed, what is free and what would help."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import psutil
from rich.filesize import decimal

from forage_retriever.search import memory
from forage_runtime.errors import UserError
from forage_runtime.telemetry.logs import get_logger

_UNPACKED = 4
"""Bytes of text per byte of gzip or Parquet, estimated."""

_BM25_SHARE = 0.9
"""Bytes of BM25 index per byte of passages, temporary files of merges included."""

_CGROUP = Path("/sys/fs/cgroup")


def measure_available_memory() -> int:
    """Bytes that this process may still allocate: of the machine, or of its container where that has less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = int((_CGROUP / "memory.max").read_text(encoding="utf-8"))
        used = int((_CGROUP / "memory.current").read_text(encoding="utf-8"))
        cached = dict(line.split() for line in (_CGROUP / "memory.stat").read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return free
    return min(free, limit - used + int(cached.get("inactive_file", 0)))


def check_build_memory(factory: str, dimension: int, passages: int) -> None:
    """Check that an index of this type can be built in memory.

    Raises:
        UserError: there is too little memory.
    """
    needed = memory.estimate_needs(factory, dimension, passages).build_bytes
    if needed > (free := measure_available_memory()):
        raise UserError(
            f"building {factory} over {passages} passages takes {decimal(needed)} of memory, of which"
            f" {decimal(free)} are free: {_suggest_cheaper(dimension, passages, free)}"
        )


def check_load_memory(factory: str, dimension: int, passages: int) -> None:
    """Check that an index of this type fits into memory; log a warning where its mapped part does not.

    Raises:
        UserError: there is too little memory for the part that is held.
    """
    free = measure_available_memory()
    needs = memory.estimate_needs(factory, dimension, passages)
    if needs.held_bytes > free:
        raise UserError(memory.describe_shortage(factory, dimension, passages, free))
    if needs.ram_bytes > free:
        get_logger().warning("index_reads_from_disk", why=memory.describe_shortage(factory, dimension, passages, free))


def check_disk(folder: Path, needed: int, what: str) -> None:
    """Check that a disk has room for `what`.

    Raises:
        UserError: it has not.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{what} need {decimal(needed)} on the disk of {folder.parent}, of which {decimal(free)} are free:"
            " free some, or build on another disk"
        )


def estimate_corpus_bytes(files: Sequence[Path]) -> int:
    """Bytes of the passages of corpus files, estimated."""
    return sum(file.stat().st_size * (1 if file.suffix == ".jsonl" else _UNPACKED) for file in files if file.exists())


def estimate_bm25_bytes(corpus: int) -> int:
    """Bytes on disk while the BM25 index of so many bytes of passages is built, estimated."""
    return int(corpus * _BM25_SHARE)


def estimate_dense_bytes(factory: str, dimension: int, passages: int) -> int:
    """Bytes on disk while a vector index is built, the passages' vectors included, estimated."""
    needs = memory.estimate_needs(factory, dimension, passages)
    return 4 * dimension * passages + needs.disk_bytes + needs.scratch_bytes


def measure_used_bytes(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _suggest_cheaper(dimension: int, passages: int, free: int) -> str:
    fitting = [
        factory for factory, needs in memory.list_fitting(dimension, passages, free) if needs.build_bytes <= free
    ]
    smaller = f"use retriever.faiss_factory={fitting[0]}, which would fit, or" if fitting else "use"
    return f"{smaller} shards (`forage index build --shards`)"
