"""Estimated index sizes against the files that FAISS writes."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np
import pytest

from forage_retriever.search import faiss_build, memory
from forage_retriever.search.memory import GIB

faiss.omp_set_num_threads(1)
COUNT, DIMENSION = 5000, 64
VECTORS = np.random.default_rng(0).standard_normal((COUNT, DIMENSION)).astype(np.float32)
WIKI18 = (768, 21_015_324)


@pytest.mark.parametrize(
    "factory",
    [
        "Flat",
        "SQ8",
        "SQ4",
        "SQfp16",
        "HNSW16",
        "HNSW16_SQ8",
        "HNSW16,SQ8",
        "IVF16,Flat",
        "IVF16,SQ8",
        "IVF16_HNSW32,SQ8",
        "PQ8x6np",
        "PQ16x4fs",
        "IVF16,PQ8x6np",
        "IVF16,PQ32x4fs",
        "IVF16,PQ16x4fsr",
        "PQ16x4fs,RFlat",
        "RaBitQ",
        "RaBitQ4",
        "RaBitQfs",
        "IVF16,RaBitQ",
        "IVF16,RaBitQ4",
        "IVF16,RaBitQfs",
        "IVF16,RaBitQfs4",
        "RR64,RaBitQ",
        "PCA32,Flat",
        "PCA32,IVF16,SQ8",
    ],
)
def test_estimated_index_sizes_match_faiss_files(tmp_path: Path, factory: str) -> None:
    index = faiss_build.create_index(factory, DIMENSION)
    if not index.is_trained:
        faiss_build.train_index(index, factory, VECTORS[:1000])
    faiss_build.add_vectors(index, factory, VECTORS)
    file = tmp_path / faiss_build.INDEX_FILE
    faiss_build.write_index(index, file)
    assert memory.estimate_needs(factory, DIMENSION, COUNT).ram_bytes == pytest.approx(file.stat().st_size, rel=0.04)


def test_stored_vectors_are_counted() -> None:
    for factory in ("Flat", "SQ8", "HNSW16", "PQ16x4fs,RFlat", "SQ4", "RaBitQ", "IVF16,PQ16x4fs", "PCA32,Flat"):
        stored = memory.estimate_needs(factory, DIMENSION, COUNT).vectors_bytes
        assert stored == (2 * DIMENSION * COUNT if faiss_build.needs_stored_vectors(factory, DIMENSION) else 0), factory
    assert memory.estimate_needs("Flat", DIMENSION, COUNT, vector_bytes=4).vectors_bytes == 4 * DIMENSION * COUNT


def test_only_fast_scan_codes_are_held_in_memory() -> None:
    flat, fast = memory.estimate_needs("Flat", *WIKI18), memory.estimate_needs("IVF4096,PQ192x4fs", *WIKI18)
    assert flat.held_bytes == 0
    assert flat.mapped_bytes == 4 * 768 * 21_015_324
    assert fast.mapped_bytes == 0
    assert fast.held_bytes > 96 * 21_015_324
    assert memory.estimate_needs("IVF4096,RaBitQ", *WIKI18).build_bytes > 4 * 768 * 4096 * 40  # the training sample


def test_fitting_index_types_are_listed_most_accurate_first() -> None:
    everything = [factory for factory, _ in memory.list_fitting(*WIKI18, ram_bytes=10**15)]
    assert everything[0] == "Flat"
    for gib in (1, 3, 20, 40):
        fitting = memory.list_fitting(*WIKI18, ram_bytes=gib * GIB)
        assert all(needs.ram_bytes <= gib * GIB for _, needs in fitting)
        assert [factory for factory in everything if factory in dict(fitting)] == [factory for factory, _ in fitting]
    assert memory.list_fitting(*WIKI18, ram_bytes=2**20) == []
    for factory, _ in memory.list_fitting(*WIKI18, ram_bytes=10**15):
        faiss_build.create_index(factory, 768)


def test_the_error_states_needed_and_free_memory_and_a_fitting_type() -> None:
    text = memory.describe_shortage("Flat", *WIKI18, available_bytes=40 * GIB)
    assert "needs 60.1 GiB" in text
    assert "40.0 GiB are free" in text
    assert "SQfp16 would fit with 30.1 GiB" in text
    assert "cut the corpus into shards" in memory.describe_shortage("Flat", *WIKI18, available_bytes=GIB)
