"""FAISS indexes: created from a factory string, trained on a sample, filled in blocks, written, mapped into memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from forage_common.errors import SettingsError, UserError
from forage_retriever.search import memory

RECIPE = "dense/2"
"""Changes whenever an index built by older code cannot be used."""

INDEX_FILE = "index.faiss"


def create_index(factory: str, dimension: int) -> Any:
    """An untrained index over inner products.

    Raises:
        SettingsError: FAISS does not know the factory string.
    """
    try:
        return faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise SettingsError(
            f"retriever.faiss_factory '{factory}' is not an index that FAISS can make ({_read_reason(error)}):"
            " try Flat or HNSW32"
        ) from None


def count_training_rows(index: Any, passages: int) -> int:
    """Number of vectors to train on; 0 where the index needs no training."""
    if index.is_trained:
        return 0
    inner = unwrap_index(index)
    cells = inner.nlist if isinstance(inner, faiss.IndexIVF) else 0
    return min(memory.count_training_rows(cells), passages)


def train_index(index: Any, factory: str, sample: NDArray[np.float32]) -> None:
    """Train cells and codes on some of the vectors [n, dimension].

    Raises:
        SettingsError: they are too few for this index type.
    """
    with _blame_factory(factory):
        index.train(np.ascontiguousarray(sample))


def add_vectors(index: Any, factory: str, block: NDArray[np.float32]) -> None:
    """Add the next vectors [n, dimension].

    Raises:
        SettingsError: the index does not take them.
    """
    with _blame_factory(factory):
        index.add(np.ascontiguousarray(block))


def check_searchable(index: Any, factory: str, probe: NDArray[np.float32]) -> None:
    """Search once: some factory strings create an index that can be filled but not searched.

    Raises:
        SettingsError: this index cannot be searched.
    """
    with _blame_factory(factory):
        index.search(np.ascontiguousarray(probe), 1)


def write_index(index: Any, file: Path) -> None:
    """Write an index to a file."""
    faiss.write_index(index, str(file))


def read_index(file: Path) -> Any:
    """An index, mapped into memory: processes share its pages, and loading takes no time.

    FAISS maps every kind but the codes of fast-scan indexes, which it copies.

    Raises:
        UserError: the file is missing or damaged.
    """
    try:
        return faiss.read_index(str(file), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise UserError(
            f"index {file} cannot be read ({_read_reason(error)}): delete its folder and build it again"
        ) from None


def needs_stored_vectors(factory: str, dimension: int) -> bool:
    """Whether codes of this type are too coarse to rank by, so that exact scores need the stored vectors."""
    owner = create_index(factory, dimension)  # must outlive the object it is cast to
    index = faiss.downcast_index(owner)
    if isinstance(index, faiss.IndexRefine):
        return False
    inner = unwrap_index(index)
    store = faiss.downcast_index(inner.storage) if isinstance(inner, faiss.IndexHNSW) else inner
    # One byte per dimension ranks as the vectors do, except near ties; less does not.
    return inner.d < dimension or getattr(store, "code_size", 4 * dimension) < dimension


def unwrap_index(index: Any) -> Any:
    """The index that holds the codes, below transforms and refinement, cast to its class."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        return unwrap_index(index.index)
    if isinstance(index, faiss.IndexRefine):
        return unwrap_index(index.base_index)
    return index


@contextmanager
def _blame_factory(factory: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise SettingsError(
            f"retriever.faiss_factory '{factory}' does not fit the corpus ({_read_reason(error)}): try Flat"
        ) from None


def _read_reason(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[-1]
