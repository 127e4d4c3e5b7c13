"""Vectors on disk: `vectors.npy`, written part by part; parts written before a kill are kept."""

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
    """Writes vectors [passages, dimension] in float32, and resumes from those of a killed process.

    Attributes:
        done: number of vectors that are synced to disk.
    """

    def __init__(self, folder: Path, key: str, passages: int, dimension: int) -> None:
        """`key` names the texts and the encoder; vectors of another key are overwritten."""
        self._progress = folder / _PROGRESS_FILE
        self._key = key
        self._passages = passages
        self._row_bytes = 4 * dimension
        self.done = self._read_progress()
        self._file = (folder / VECTORS_FILE).open("r+b" if self.done else "w+b")
        header: dict[str, Any] = {"descr": "<f4", "fortran_order": False, "shape": (passages, dimension)}
        np.lib.format.write_array_header_1_0(self._file, header)
        self._begin = self._file.tell()
        if self._begin + self.done * self._row_bytes > os.fstat(self._file.fileno()).st_size:
            self.done = 0
        self._file.truncate(self._begin + self.done * self._row_bytes)

    def append(self, part: NDArray[np.float32]) -> None:
        """Add the next vectors [n, dimension] and sync them.

        Raises:
            UserError: one of them is not finite.
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
        """Close the file."""
        self._file.close()

    def _read_progress(self) -> int:
        try:
            progress = json.loads(self._progress.read_text())
        except FileNotFoundError:
            return 0
        return int(progress["done"]) if progress["key"] == self._key else 0


def map_vectors(file: Path) -> NDArray[Any]:
    """Vectors [n, d] mapped into memory.

    Raises:
        UserError: the file is damaged.
    """
    try:
        vectors: NDArray[Any] = np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"vectors {file} cannot be read ({error}): build this index again") from None
    return vectors


def iterate_blocks(vectors: NDArray[Any]) -> Iterator[NDArray[np.float32]]:
    """Vectors [n, d] as float32 blocks of bounded size, in order."""
    rows = max(_BLOCK_BYTES // (4 * vectors.shape[1]), 1)
    for begin in range(0, len(vectors), rows):
        yield np.asarray(vectors[begin : begin + rows], np.float32)


def sample_vectors(vectors: NDArray[Any], rows: int) -> NDArray[np.float32]:
    """At most `rows` of the vectors [n, d], evenly spaced."""
    places = np.linspace(0, len(vectors), min(rows, len(vectors)), endpoint=False).astype(np.int64)
    return np.asarray(vectors[places], np.float32)


def save_vectors(vectors: NDArray[Any], file: Path, precision: str) -> None:
    """Write a copy of the vectors in another precision."""
    with file.open("wb") as out:
        header: dict[str, Any] = {"fortran_order": False, "shape": vectors.shape}
        header["descr"] = np.lib.format.dtype_to_descr(np.dtype(precision))
        np.lib.format.write_array_header_1_0(out, header)
        for block in iterate_blocks(vectors):
            out.write(block.astype(precision).tobytes())
