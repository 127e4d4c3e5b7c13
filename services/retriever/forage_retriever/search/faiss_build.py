"""FAISS indexes: created from a factory string, trained on a sample, filled in blocks, written, mapped into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from forage_retriever.search import memory
from forage_runtime.errors import SettingsError, UserError

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

    Args:
        probe: some of its vectors [n, dimension].

    Raises:
        SettingsError: this index cannot be searched, or not by inner products of such vectors.
    """
    with _blame_factory(factory):
        index.search(np.ascontiguousarray(probe), 1)
    lengths = np.linalg.norm(probe, axis=1)
    if ranks_by_distance(index) and not np.allclose(lengths, 1, atol=0.01):
        raise SettingsError(
            f"retriever.faiss_factory is '{factory}', which FAISS searches by distance instead of inner product: the"
            f" same order for vectors of length 1, but the encoder's are {lengths.min():.3g} to {lengths.max():.3g}"
            " long. Use HNSW with SQ8 or without codes, or IVF with these codes"
        )


def ranks_by_distance(index: Any) -> bool:
    """Whether scores are squared distances, rising: FAISS 1.15 gives HNSW over PQ codes a storage of that metric."""
    inner = unwrap_index(index)
    storage = faiss.downcast_index(inner.storage) if isinstance(inner, faiss.IndexHNSW | faiss.IndexNSG) else inner
    return bool(storage.metric_type == faiss.METRIC_L2)


def write_index(index: Any, file: Path) -> None:
    """Write an index to a file."""
    faiss.write_index(index, str(file))


def read_index(file: Path) -> Any:
    """An index, mapped into memory: processes share its pages, and loading takes no time.

    FAISS maps every kind but the codes of fast-scan indexes, which it copies.

    Raises:
        UserError: the file is missing or damaged, or maps its rows to ids of its own.
    """
    try:
        index = faiss.read_index(str(file), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise UserError(
            f"index {file} cannot be read ({_read_reason(error)}): delete its folder and build it again"
        ) from None
    if isinstance(unwrap_index(index), faiss.IndexIDMap):
        raise UserError(
            f"index {file} maps its rows to ids of its own (IndexIDMap), expected row n to be passage n: bring the"
            " corpus into the order of the rows, write the index within with faiss.write_index(index.index, FILE), and"
            " adopt that file"
        )
    return index


def count_foreign_ids(index: Any) -> int:
    """How many numbers of rows, from 0 on, an index has no vector of: other ids were given to vectors of IVF lists."""
    inner = unwrap_index(index)
    if not isinstance(inner, faiss.IndexIVF):
        return 0
    held: NDArray[np.bool_] = np.zeros(int(index.ntotal), np.bool_)
    for cell in range(inner.nlist):
        if size := inner.invlists.list_size(cell):
            ids = faiss.rev_swig_ptr(inner.invlists.get_ids(cell), size)
            held[ids[(ids >= 0) & (ids < len(held))]] = True
    return int(np.count_nonzero(~held))


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


def split_transforms(index: Any) -> tuple[list[Any], Any]:
    """The transforms of queries, in order, and the index behind them."""
    transforms: list[Any] = []
    index = faiss.downcast_index(index)
    while isinstance(index, faiss.IndexPreTransform):
        transforms += [faiss.downcast_VectorTransform(index.chain.at(n)) for n in range(index.chain.size())]
        index = faiss.downcast_index(index.index)
    return transforms, index


def transform_vectors(transforms: Sequence[Any], vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Apply transforms to vectors [n, dimension], one at a time: a product of matrices rounds by their shapes."""
    if not transforms or not len(vectors):
        return vectors
    done = []
    for vector in np.split(vectors, len(vectors)):
        for transform in transforms:
            vector = transform.apply(vector)
        done.append(vector)
    return np.concatenate(done)


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
