"""Writes FAISS index files block by block, so that building one takes no memory for its codes.

FAISS itself builds an index in memory and then writes it. Files of flat codes (`Flat`, `SQ…`) and of inverted lists
(`IVF…` with such codes, PQ or RaBitQ) end with the codes, so the header that FAISS writes for the empty index is
followed here by codes that FAISS has computed. The files are the same, byte for byte, as those that FAISS writes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import faiss
import numpy as np
from numpy.typing import NDArray

from forage_retriever.search import faiss_build
from forage_retriever.search.row_files import RowFile, RowFiles
from forage_retriever.search.vectors import iterate_blocks

CELLS_FILE, CODES_FILE = "cells.bin", "codes.bin"
SORTED_BYTES = 256 * 2**20
"""Bytes of codes that are sorted by cell at once."""

_NTOTAL = slice(8, 16)
"""Where FAISS's header of every index has the number of its vectors: behind its type and its dimension."""

_CELL = "<i4"
_COUNTED_BYTES = 8 * 2**20
_COUNTED = 2**22
_COUNT = struct.Struct("<Q")
_NO_LISTS = b"sprs" + _COUNT.pack(0)
_FLAT = (faiss.IndexFlat, faiss.IndexScalarQuantizer)
_LISTS = (faiss.IndexIVFFlat, faiss.IndexIVFScalarQuantizer, faiss.IndexIVFPQ, faiss.IndexIVFRaBitQ)
_OTHER_LISTS = (faiss.IndexIVFFlatDedup, faiss.IndexIVFPQR)

Progress = Callable[[int], None]


def is_flat(index: Any) -> bool:
    """Whether the index's file is a header and the codes of its vectors, in their order."""
    return isinstance(faiss.downcast_index(index), _FLAT)


def is_inverted(index: Any) -> bool:
    """Whether the index's file ends with plain inverted lists."""
    inner = faiss_build.unwrap_index(index)
    return (
        not isinstance(faiss.downcast_index(index), faiss.IndexRefine)
        and isinstance(inner, _LISTS)
        and not isinstance(inner, _OTHER_LISTS)
    )


def write_flat(index: Any, vectors: NDArray[Any], file: Path, progress: Progress) -> None:
    """Write the file of a trained flat index over vectors [n, d]."""
    done = 0
    with file.open("wb") as out:
        write_flat_header(index, len(vectors), out)
        for block in iterate_blocks(vectors):
            out.write(index.sa_encode(np.ascontiguousarray(block)).tobytes())
            done += len(block)
            progress(done)


def write_flat_header(index: Any, count: int, out: BinaryIO) -> None:
    """Write what precedes the codes of `count` vectors in the file of a flat index; `index` is trained and empty."""
    header = _read_header(index)
    length = count * index.sa_code_size()
    unit = 4 if isinstance(faiss.downcast_index(index), faiss.IndexFlat) else 1  # its codes are counted as floats
    header[_NTOTAL] = _COUNT.pack(count)
    header[-_COUNT.size :] = _COUNT.pack(length // unit)
    out.write(header)


def encode_into_cells(index: Any, vectors: NDArray[Any], folder: Path, key: str, progress: Progress) -> None:
    """Write cell and code of each of the vectors [n, d] for a trained IVF index, from the last checkpoint on."""
    inner = faiss_build.unwrap_index(index)
    files = [RowFile(CELLS_FILE, np.dtype(_CELL).itemsize), RowFile(CODES_FILE, inner.code_size)]
    writer = RowFiles(folder, key, len(vectors), files)
    try:
        # Blocks are small, so that a minute's checkpoint is possible where the search for the cell is slow.
        for block in iterate_blocks(vectors[writer.done :], _COUNTED_BYTES):
            rows = np.ascontiguousarray(_transform(index, np.ascontiguousarray(block)))
            cells = np.ascontiguousarray(inner.quantizer.search(rows, 1)[1].ravel(), np.int64)
            codes: NDArray[np.uint8] = np.empty((len(rows), inner.code_size), np.uint8)
            inner.encode_vectors(len(rows), *map(faiss.swig_ptr, (rows, cells, codes)))
            writer.append({CELLS_FILE: cells.astype(_CELL).tobytes(), CODES_FILE: codes.tobytes()})
            progress(writer.done)
    finally:
        writer.close()


def write_inverted(index: Any, folder: Path, file: Path, progress: Progress) -> None:
    """Write the file of a trained IVF index from the cells and codes that `encode_into_cells` wrote into a folder."""
    inner = faiss_build.unwrap_index(index)
    size = int(inner.code_size)
    cells: NDArray[np.int32] = np.memmap(folder / CELLS_FILE, _CELL, "r")
    sizes = np.zeros(inner.nlist, np.int64)
    for begin in range(0, len(cells), _COUNTED):
        sizes += np.bincount(cells[begin : begin + _COUNTED], minlength=inner.nlist)
    with file.open("wb") as out, (folder / CODES_FILE).open("rb") as codes:
        begin = _write_list_header(index, len(cells), sizes, out)
        ends = begin + np.cumsum(sizes * (size + 8))
        starts = ends - sizes * (size + 8)  # of each list: its codes, then its ids
        out.truncate(int(ends[-1]))
        filled = np.zeros_like(sizes)
        rows = max(SORTED_BYTES // (size + 8), 1)
        for first in range(0, len(cells), rows):
            block = np.frombuffer(codes.read(rows * size), np.uint8).reshape(-1, size)
            order = np.argsort(cells[first : first + rows], kind="stable")
            for cell, members in _group(np.asarray(cells[first : first + rows])[order], order):
                at = int(starts[cell]), int(filled[cell])
                os.pwrite(out.fileno(), block[members].tobytes(), at[0] + at[1] * size)
                ids = (first + members).astype("<i8").tobytes()
                os.pwrite(out.fileno(), ids, at[0] + int(sizes[cell]) * size + at[1] * 8)
                filled[cell] += len(members)
            progress(first + len(block))


def _group(cells: NDArray[np.int32], rows: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Each cell with its rows, from cells in order."""
    found, begins = np.unique(cells, return_index=True)
    yield from zip(found.tolist(), np.split(rows, begins[1:]), strict=True)


def _write_list_header(index: Any, count: int, sizes: NDArray[np.int64], out: BinaryIO) -> int:
    """Write what precedes the lists in the file of an IVF index, and return its length."""
    inner = faiss_build.unwrap_index(index)
    for layer in (faiss.downcast_index(index), inner):
        layer.ntotal = count
    try:
        header = bytes(_read_header(index))
    finally:
        for layer in (faiss.downcast_index(index), inner):
            layer.ntotal = 0
    if not header.endswith(_NO_LISTS):
        raise RuntimeError(f"FAISS {faiss.__version__} writes inverted lists in another layout")
    out.write(header.removesuffix(_NO_LISTS))
    filled = np.flatnonzero(sizes)
    if len(filled) > inner.nlist // 2:
        kind, table = b"full", sizes
    else:
        kind, table = b"sprs", np.stack([filled, sizes[filled]], axis=1).ravel()
    out.write(kind + _COUNT.pack(len(table)) + table.astype("<i8").tobytes())
    return out.tell()


def _transform(index: Any, block: NDArray[np.float32]) -> NDArray[np.float32]:
    index = faiss.downcast_index(index)
    while isinstance(index, faiss.IndexPreTransform):
        for place in range(index.chain.size()):
            block = index.chain.at(place).apply(block)
        index = faiss.downcast_index(index.index)
    return block


def _read_header(index: Any) -> bytearray:
    """What FAISS writes for an index without vectors."""
    writer = faiss.VectorIOWriter()
    faiss.write_index(index, writer)
    return bytearray(faiss.vector_to_array(writer.data).tobytes())
