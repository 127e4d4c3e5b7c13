"""Vectors on disk: `vectors.npy`, written part by part; parts written before a kill are kept."""

from __future__ import annotations

import io
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forage_retriever.search.row_files import RowFile, RowFiles
from forage_runtime.errors import UserError

VECTORS_FILE = "vectors.npy"
_BLOCK_BYTES = 64 * 2**20
_SAMPLED = 2**14
"""Rows of a sample that are read at once: each takes a page or two of the file into memory."""


class VectorsWriter:
    """Writes vectors [passages, dimension] in float32, and resumes from those of a killed process."""

    def __init__(self, folder: Path, key: str, passages: int, dimension: int) -> None:
        """`key` names the texts and the encoder; vectors of another key are overwritten."""
        header = io.BytesIO()
        shape: dict[str, Any] = {"descr": "<f4", "fortran_order": False, "shape": (passages, dimension)}
        np.lib.format.write_array_header_1_0(header, shape)
        self._rows = RowFiles(folder, key, passages, [RowFile(VECTORS_FILE, 4 * dimension, header.getvalue())])

    @property
    def done(self) -> int:
        """Number of vectors that are written."""
        return self._rows.done

    def append(self, part: NDArray[np.float32]) -> None:
        """Add the next vectors [n, dimension].

        Raises:
            UserError: one of them is not finite.
        """
        bad = np.flatnonzero(~np.isfinite(part).all(axis=1))
        if len(bad):
            raise UserError(f"the encoder gives no vector for passage {self.done + int(bad[0])}: is its model damaged?")
        self._rows.append({VECTORS_FILE: np.ascontiguousarray(part, "<f4").tobytes()})

    def close(self) -> None:
        """Close the file, with a checkpoint."""
        self._rows.close()


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


def iterate_blocks(vectors: NDArray[Any], block_bytes: int = 0) -> Iterator[NDArray[np.float32]]:
    """Vectors [n, d] as float32 blocks of bounded size, in order."""
    rows = max((block_bytes or _BLOCK_BYTES) // (4 * vectors.shape[1]), 1)
    for begin in range(0, len(vectors), rows):
        yield np.asarray(vectors[begin : begin + rows], np.float32)
        release_pages(vectors)


def release_pages(vectors: NDArray[Any]) -> None:
    """Take the pages that were read of vectors mapped from a file out of this process; they stay in the page cache.

    Otherwise its memory appears to grow to the size of the file, and a limit on it would end the process.
    """
    mapped = getattr(vectors, "_mmap", None)
    if isinstance(mapped, mmap.mmap) and hasattr(mapped, "madvise"):
        mapped.madvise(mmap.MADV_DONTNEED)


def sample_vectors(vectors: NDArray[Any], rows: int) -> NDArray[np.float32]:
    """At most `rows` of the vectors [n, d], evenly spaced."""
    places = np.linspace(0, len(vectors), min(rows, len(vectors)), endpoint=False).astype(np.int64)
    sample: NDArray[np.float32] = np.empty((len(places), vectors.shape[1]), np.float32)
    for begin in range(0, len(places), _SAMPLED):
        sample[begin : begin + _SAMPLED] = vectors[places[begin : begin + _SAMPLED]]
        release_pages(vectors)
    return sample


def save_vectors(vectors: NDArray[Any], file: Path, precision: str) -> None:
    """Write a copy of the vectors in another precision."""
    with file.open("wb") as out:
        header: dict[str, Any] = {"fortran_order": False, "shape": vectors.shape}
        header["descr"] = np.lib.format.dtype_to_descr(np.dtype(precision))
        np.lib.format.write_array_header_1_0(out, header)
        for block in iterate_blocks(vectors):
            out.write(block.astype(precision).tobytes())
