"""FAISS files that others made: what is in them, and whether they belong to a corpus and an encoder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import faiss
import numpy as np
from numpy.typing import NDArray

from forage_common.errors import DataError, UserError
from forage_common.files import durable
from forage_retriever.corpus.store import Corpus
from forage_retriever.search import faiss_build

if TYPE_CHECKING:
    from forage_retriever.encoders.encoder import Encoder

LEAST_COSINE = 0.9
"""Between a stored vector and its passage encoded anew: half precision and int8 stay above, another model far below."""

_PROBED = 16


def inspected(file: Path, dimension: int) -> str:
    """A name for the type of index in a file, for people.

    Raises:
        UserError: it is no FAISS index over inner products of this dimension.
    """
    index = faiss_build.read(file)
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise UserError(f"{file} ranks by distance, not by inner product: build an index of its corpus instead")
    if index.d != dimension:
        raise UserError(
            f"{file} holds vectors of {index.d} numbers, the encoder gives {dimension}: set retriever.encoder.model to"
            " the one that it was built with"
        )
    return type(faiss.downcast_index(index)).__name__


def adopt(folder: Path, file: Path, corpus: Corpus, encoder: Encoder) -> None:
    """Put a FAISS file into the folder of a dense index.

    Raises:
        DataError: it holds another number of vectors than there are passages, or vectors of other texts.
    """
    index = faiss_build.read(file)
    if index.ntotal != len(corpus):
        raise DataError(
            f"{file} holds {index.ntotal} vectors and the corpus {len(corpus)} passages: give the corpus that it was"
            " built from"
        )
    rows = np.linspace(0, len(corpus) - 1, min(_PROBED, len(corpus))).astype(int).tolist()
    wanted = encoder.passages([corpus.contents[row] for row in rows], lambda done: None)
    try:
        stored = np.stack([index.reconstruct(row) for row in rows])
    except RuntimeError:  # a type that does not give vectors back: a passage should at least find itself
        found = index.search(wanted, 10)[1]
        agreement = float(np.mean([row in near for row, near in zip(rows, found, strict=True)]))
    else:
        lengths = np.linalg.norm(stored, axis=1) * np.linalg.norm(wanted, axis=1)
        agreement = float(np.median((stored * wanted).sum(axis=1) / np.maximum(lengths, 1e-9)))
    if agreement < LEAST_COSINE:
        raise DataError(
            f"the vectors of {file} are not those of the corpus under encoder {encoder.model} (agreement"
            f" {agreement:.2f}): give the corpus it was built from, in its order, and its encoder"
        )
    durable.link_or_copy(file, folder / faiss_build.INDEX_FILE)


def reconstructed(folder: Path, factory: str) -> NDArray[Any]:
    """The vectors [n, d] of an index that keeps them exactly, mapped into memory.

    Raises:
        UserError: it does not.
    """
    file = folder / faiss_build.INDEX_FILE
    owner = faiss_build.read(file)
    index = faiss.downcast_index(owner)
    kept = faiss.downcast_index(index.storage) if isinstance(index, faiss.IndexHNSW) else index
    if not isinstance(kept, faiss.IndexFlat):
        raise UserError(
            f"index {folder.parent} keeps no vectors and {factory} does not give them back: build it with --vectors"
        )
    shape = (index.ntotal, index.d)
    # FAISS writes a flat index, by itself or under a graph, as a header and the vectors.
    vectors: NDArray[Any] = np.memmap(file, "<f4", "r", file.stat().st_size - 4 * shape[0] * shape[1], shape)
    ends = [0, shape[0] - 1]
    if not np.array_equal(vectors[ends], [index.reconstruct(row) for row in ends]):
        raise UserError(f"{file} is laid out as FAISS did not use to: build this index anew from its corpus")
    return vectors
