"""The best of one is the head of the best of three: in every index type, filtered or not, in every batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from vector_folders import KINDS, write_vector_index

from forage_retriever.hits import Hit
from forage_retriever.search import flat_scan
from forage_retriever.search.hybrid import fuse_rankings
from forage_retriever.search.vector_index import VectorIndex
from forage_runtime.errors import SettingsError
from forage_runtime.settings import RetrieverSettings

faiss.omp_set_num_threads(1)

DIMENSION, DISTINCT, COUNT = 32, 400, 1500
DRAW = np.random.default_rng(5)
KNOWN = DRAW.standard_normal((DISTINCT, DIMENSION)).astype(np.float32)
KNOWN *= DRAW.uniform(0.5, 3.0, (DISTINCT, 1)).astype(np.float32)
PASSAGES = KNOWN[DRAW.integers(0, DISTINCT, COUNT) ** 2 // DISTINCT]
"""Some once, some a hundred times, at places anywhere."""
QUERIES = np.concatenate([KNOWN[:20], DRAW.standard_normal((44, DIMENSION)).astype(np.float32)])
EVERY_THIRD = np.arange(COUNT) % 3 == 0
FEW = np.arange(COUNT) % 47 == 0

Built = Callable[[str], VectorIndex]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    root = tmp_path_factory.mktemp("indexes")
    indexes: dict[str, VectorIndex] = {}

    def get(factory: str) -> VectorIndex:
        if factory not in indexes:
            lengths = np.linalg.norm(PASSAGES, axis=1, keepdims=True) if "HNSW16_PQ" in factory else 1
            folder = write_vector_index(root / factory, factory, PASSAGES / lengths)
            indexes[factory] = VectorIndex(folder, RetrieverSettings())
        return indexes[factory]

    return get


def check_heads(index: VectorIndex, mask: NDArray[np.bool_] | None, k: int, more: int, batch: int) -> None:
    scores, rows = index.search(QUERIES, more, mask)
    assert np.all(scores[:, 1:] <= scores[:, :-1])
    ties = (scores[:, 1:] == scores[:, :-1]) & (rows[:, 1:] >= 0)
    assert np.all(np.diff(rows, axis=1)[ties] > 0), "equal scores are in the order of rows"
    parts = [index.search(QUERIES[begin : begin + batch], k, mask) for begin in range(0, len(QUERIES), batch)]
    assert np.concatenate([part[1] for part in parts]).tolist() == rows[:, :k].tolist()
    assert np.array_equal(np.concatenate([part[0] for part in parts]), scores[:, :k])


@pytest.mark.parametrize("factory", KINDS)
@pytest.mark.parametrize("mask", [None, EVERY_THIRD, FEW], ids=["all", "a third", "few"])
def test_fewer_results_are_the_head_of_more(built: Built, factory: str, mask: NDArray[np.bool_] | None) -> None:
    for k, more, batch in [(1, 3, 1), (3, 10, 7), (10, 41, 64), (40, 60, 16)]:
        check_heads(built(factory), mask, k, more, batch)


@settings(max_examples=6)
@given(factory=st.sampled_from(KINDS), k=st.integers(1, 60), more=st.integers(0, 60), batch=st.integers(1, 64))
def test_so_they_are_for_any_number_and_batch(built: Built, factory: str, k: int, more: int, batch: int) -> None:
    check_heads(built(factory), None, k, k + more, batch)


@pytest.mark.parametrize("scan", [False, True])
def test_an_exact_index_has_the_order_of_exact_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scan: bool
) -> None:
    if scan:
        monkeypatch.setattr(flat_scan, "MIN_ROWS", 1)
    index = VectorIndex(write_vector_index(tmp_path, "Flat", PASSAGES), RetrieverSettings())
    exact = np.einsum("qd,rd->qr", QUERIES.astype(np.float64), PASSAGES.astype(np.float64)).astype(np.float32)
    want = np.argsort(-exact, axis=1, kind="stable")[:, :150]
    for batch in (1, 3, 64):
        rows = np.concatenate([index.search(QUERIES[at : at + batch], 150)[1] for at in range(0, 64, batch)])
        assert rows.tolist() == want.tolist()


def test_a_corpus_of_one_vector_is_found_in_its_order(tmp_path: Path) -> None:
    index = VectorIndex(write_vector_index(tmp_path, "Flat", np.repeat(KNOWN[:1], 3000, axis=0)), RetrieverSettings())
    assert index.search(QUERIES[:2], 700)[1].tolist() == [list(range(700))] * 2


@given(
    st.lists(st.permutations(range(300)), min_size=1, max_size=3),
    st.integers(1, 60),
    st.integers(0, 60),
)
def test_fused_results_have_heads_too(rankings: list[list[int]], k: int, more: int) -> None:
    weights = [3.0, 1.0, 1.0][: len(rankings)]
    hits: list[Hit] = fuse_rankings(rankings, weights, k + more, 60)
    assert fuse_rankings(rankings, weights, k, 60) == hits[:k]
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_an_index_that_ranks_by_distance_needs_vectors_of_length_one(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"HNSW16_PQ16x4np', which FAISS searches by distance .* HNSW with SQ8"):
        write_vector_index(tmp_path / "any", "HNSW16_PQ16x4np", PASSAGES)
    units = KNOWN / np.linalg.norm(KNOWN, axis=1, keepdims=True)
    folder = write_vector_index(tmp_path / "unit", "HNSW16_PQ16x4np", units)
    scores, rows = VectorIndex(folder, RetrieverSettings(refine=1)).search(units[:50], 10)
    assert np.mean(rows[:, 0] == np.arange(50)) > 0.8
    exact = np.take_along_axis(units[:50] @ units.T, rows, axis=1)
    assert np.corrcoef(scores.ravel(), exact.ravel())[0, 1] > 0.9, "scores are inner products of the codes"
