"""Vectors on disk: `vectors.npy`, grown part by part, of which what was written before a kill is kept."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forage_common.errors import UserError
from forage_common.files import durable

VECTORS_FILE = "vectors.npy"
_PROGRESS_FILE = "progress.json"
_BLOCK_BYTES = 64 * 2**20


class VectorsWriter:
    """Writes vectors [passages, dimension] in float32, and goes on with those that a killed process left.

    Attributes:
        done: how many are on disk for good.
    """

    def __init__(self, folder: Path, key: str, passages: int, dimension: int) -> None:
        """`key` names what the vectors are of; those of another are written over."""
        self._progress = folder / _PROGRESS_FILE
        self._key = key
        self._passages = passages
        self._row_bytes = 4 * dimension
        self.done = self._kept()
        self._file = (folder / VECTORS_FILE).open("r+b" if self.done else "w+b")
        header: dict[str, Any] = {"descr": "<f4", "fortran_order": False, "shape": (passages, dimension)}
        np.lib.format.write_array_header_1_0(self._file, header)
        self._begin = self._file.tell()
        if self._begin + self.done * self._row_bytes > os.fstat(self._file.fileno()).st_size:
            self.done = 0
        self._file.truncate(self._begin + self.done * self._row_bytes)

    def append(self, part: NDArray[np.float32]) -> None:
        """Add the next vectors [n, dimension].

        Raises:
            UserError: one of them is no number.
        """
        bad = np.flatnonzero(~np.isfinite(part).all(axis=1))
        if len(bad):
            raise UserError(f"the encoder gives no vector for passage {self.done + int(bad[0])}: is its model damaged?")
        self._file.seek(self._begin + self.done * self._row_bytes)
        self._file.write(np.ascontiguousarray(part, "<f4").tobytes())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done += len(part)
        durable.write_atomically(self._progress, json.dumps({"key": self._key, "done": self.done}))

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _kept(self) -> int:
        try:
            progress = json.loads(self._progress.read_text())
        except FileNotFoundError:
            return 0
        return int(progress["done"]) if progress["key"] == self._key else 0


def mapped(file: Path) -> NDArray[Any]:
    """Vectors [n, d] mapped into memory.

    Raises:
        UserError: the file is damaged.
    """
    try:
        found: NDArray[Any] = np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"vectors {file} cannot be read ({error}): build this index again") from None
    return found


def blocks(vectors: NDArray[Any]) -> Iterator[NDArray[np.float32]]:
    """Vectors [n, d] as float32 blocks of bounded size, in order."""
    rows = max(_BLOCK_BYTES // (4 * vectors.shape[1]), 1)
    for begin in range(0, len(vectors), rows):
        yield np.asarray(vectors[begin : begin + rows], np.float32)


def sample(vectors: NDArray[Any], rows: int) -> NDArray[np.float32]:
    """At most so many of them [rows, d], evenly spaced."""
    places = np.linspace(0, len(vectors), min(rows, len(vectors)), endpoint=False).astype(np.int64)
    return np.asarray(vectors[places], np.float32)


def save(vectors: NDArray[Any], file: Path, precision: str) -> None:
    """Write a copy in another precision."""
    with file.open("wb") as out:
        header: dict[str, Any] = {"fortran_order": False, "shape": vectors.shape}
        header["descr"] = np.lib.format.dtype_to_descr(np.dtype(precision))
        np.lib.format.write_array_header_1_0(out, header)
        for block in blocks(vectors):
            out.write(block.astype(precision).tobytes())
