"""Folders of vector indexes, of every type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forage_retriever.search import faiss_build
from forage_retriever.search.vectors import VECTORS_FILE

DIMENSION = 32
KINDS = [
    "Flat",
    "SQ8",
    "HNSW16",
    "HNSW16_SQ8",
    f"PCA{DIMENSION},HNSW16",
    "HNSW16_PQ16x4np",
    "IVF32,Flat",
    f"PCA{DIMENSION},IVF32,Flat",
    "PQ16x4fs",
    "PQ16x4np",
    "IVF32,PQ16x4fs",
    "RaBitQ",
    "IVF32,RaBitQ",
    "IVF32,RaBitQfs",
    "PQ16x4fs,RFlat",
]
"""Factory strings for vectors of this dimension."""


def fill(index: Any, factory: str, vectors: NDArray[np.float32]) -> None:
    if rows := faiss_build.count_training_rows(index, len(vectors)):
        faiss_build.train_index(index, factory, vectors[:rows])
    for begin in range(0, len(vectors), 1500):
        faiss_build.add_vectors(index, factory, vectors[begin : begin + 1500])
    faiss_build.check_searchable(index, factory, vectors[:1])


def write_vector_index(folder: Path, factory: str, vectors: NDArray[np.float32]) -> Path:
    """Write an index of these vectors [n, dimension] as `forage index build` does; returns its folder."""
    index = faiss_build.create_index(factory, vectors.shape[1])
    fill(index, factory, vectors)
    folder.mkdir(parents=True, exist_ok=True)
    faiss_build.write_index(index, folder / faiss_build.INDEX_FILE)
    if faiss_build.needs_stored_vectors(factory, vectors.shape[1]):
        np.save(folder / VECTORS_FILE, vectors.astype(np.float16))
    return folder
