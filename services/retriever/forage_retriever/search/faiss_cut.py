"""Reads and cuts FAISS files whose last part is the codes of all vectors in their order, without loading them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from forage_retriever.search import faiss_build, faiss_stream
from forage_runtime.errors import UserError

_COPIED = 16 * 2**20


def map_flat(file: Path, index: Any) -> NDArray[Any] | None:
    """The vectors [n, d] in a file of an index, mapped; None where the file does not have them as numbers.

    Raises:
        UserError: the file has another layout.
    """
    top = faiss.downcast_index(index)  # which its owner must outlive
    store = faiss.downcast_index(top.storage) if isinstance(top, faiss.IndexHNSW) else top
    halves = isinstance(store, faiss.IndexScalarQuantizer) and store.sq.qtype == faiss.ScalarQuantizer.QT_fp16
    if not (isinstance(store, faiss.IndexFlat) or halves) or not index.ntotal:
        return None
    kind = np.dtype("<f2" if halves else "<f4")
    shape = (int(index.ntotal), int(index.d))
    vectors: NDArray[Any] = np.memmap(file, kind, "r", file.stat().st_size - kind.itemsize * shape[0] * shape[1], shape)
    ends = [0, shape[0] - 1]
    # With NaN, which is to be found and named by whoever reads the vectors.
    if not np.array_equal(np.asarray(vectors[ends], np.float32), [store.reconstruct(row) for row in ends], True):
        raise UserError(f"{file} has a layout that FAISS did not have before: build this index again from its corpus")
    return vectors


def check_cuttable(file: Path, index: Any) -> None:
    """Check that rows of a FAISS file can be cut out of it.

    Raises:
        UserError: its type mixes them.
    """
    if not faiss_stream.is_flat(index):
        kind = type(faiss.downcast_index(index)).__name__
        raise UserError(
            f"{file} is of type {kind}, whose rows cannot be cut out without loading it; only Flat and SQ files can be:"
            " import it whole, without --shards, or build shards from the corpus with"
            " `forage index build NAME --corpus FILE --shards N --faiss-factory TYPE`"
        )


def measure_rows(file: Path, count: int) -> int:
    """Bytes of the codes of so many rows of a cuttable file."""
    return count * int(faiss_build.read_index(file).sa_code_size())


def cut_rows(file: Path, first: int, end: int, out: Path, progress: Callable[[int], None]) -> None:
    """Write rows `first` to `end` of a cuttable FAISS file as a FAISS file of their own, a few MiB at a time.

    Raises:
        UserError: the result does not have the vectors of these rows: the file has another layout.
    """
    owner = faiss_build.read_index(file)
    check_cuttable(file, owner)
    index = faiss.downcast_index(owner)
    size = int(index.sa_code_size())
    begin = file.stat().st_size - int(index.ntotal) * size
    with file.open("rb") as source, out.open("wb") as target:
        faiss_stream.write_flat_header(_make_empty(index), end - first, target)
        source.seek(begin + first * size)
        left = (end - first) * size
        while left:
            if not (block := source.read(min(_COPIED, left))):
                raise UserError(f"{file} became shorter while it was read: copy it again")
            target.write(block)
            left -= len(block)
            progress(end - first - left // size)
    part = faiss_build.read_index(out)
    rows = np.unique(np.linspace(first, end - 1, 16).astype(np.int64))
    if part.ntotal != end - first or not all(
        np.array_equal(part.reconstruct(int(row) - first), index.reconstruct(int(row))) for row in rows
    ):
        raise UserError(f"{file} has a layout that FAISS did not have before: build an index of its corpus instead")


def _make_empty(index: Any) -> Any:
    """A trained index like this one, without vectors."""
    if isinstance(index, faiss.IndexFlat):
        return faiss.IndexFlat(index.d, index.metric_type)
    empty = faiss.IndexScalarQuantizer(index.d, index.sq.qtype, index.metric_type)
    empty.sq = index.sq
    empty.is_trained = True
    return empty
