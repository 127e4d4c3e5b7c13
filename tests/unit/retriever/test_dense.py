"""FAISS indexes of every type against brute force: unfiltered, filtered, refined; and as files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from vector_folders import DIMENSION, KINDS, fill, write_vector_index

from forage_retriever.search import faiss_build, flat_scan, vector_index
from forage_retriever.search.vector_index import Effort, VectorIndex
from forage_runtime.errors import SettingsError, UserError
from forage_runtime.settings import RetrieverSettings

COUNT = 4000
LOSSY = ["PQ16x4fs", "PQ16x4np", "IVF32,PQ16x4fs", "RaBitQ", "IVF32,RaBitQ", "IVF32,RaBitQfs"]

Vectors = NDArray[np.float32]
Built = Callable[[str], VectorIndex]


def draw_unit_vectors(count: int, seed: int) -> Vectors:
    vectors = np.random.default_rng(seed).standard_normal((count, DIMENSION)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


WIDE = Effort(ef_search=128, nprobe=32, refine=300)

PASSAGES, QUERIES = draw_unit_vectors(COUNT, seed=1), draw_unit_vectors(40, seed=2)


faiss.omp_set_num_threads(1)  # several would wait for each other at each of many small steps


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Indexes over PASSAGES by factory string, built once."""
    root = tmp_path_factory.mktemp("indexes")
    indexes: dict[str, VectorIndex] = {}

    def get(factory: str) -> VectorIndex:
        if factory not in indexes:
            indexes[factory] = VectorIndex(write_vector_index(root / factory, factory, PASSAGES), RetrieverSettings())
        return indexes[factory]

    return get


def rank_best(queries: Vectors, k: int, mask: NDArray[np.bool_] | None = None) -> list[list[int]]:
    scores = queries @ PASSAGES.T
    if mask is not None:
        scores[:, ~mask] = -np.inf
    nearest: list[list[int]] = np.argsort(-scores, axis=1, kind="stable")[:, :k].tolist()
    return nearest


def measure_overlap(rows: NDArray[np.int64], wanted: list[list[int]]) -> float:
    return sum(len(set(own) & set(of)) for own, of in zip(rows.tolist(), wanted, strict=True)) / sum(map(len, wanted))


@pytest.mark.parametrize("batch", [1, 7, 64, 100])
def test_a_flat_index_equals_brute_force(built: Built, batch: int) -> None:
    queries = draw_unit_vectors(batch, seed=3)
    scores, rows = built("Flat").search(queries, 10)
    assert rows.tolist() == rank_best(queries, 10)
    assert scores == pytest.approx(np.take_along_axis(queries @ PASSAGES.T, rows, 1), abs=1e-5)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(topk=st.integers(1, 60), batch=st.integers(1, 12), seed=st.integers(0, 1000))
def test_the_flat_scan_equals_brute_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topk: int, batch: int, seed: int
) -> None:
    monkeypatch.setattr(flat_scan, "MIN_ROWS", 1)
    monkeypatch.setattr(flat_scan, "_BLOCK_ROWS", 37)
    passages = np.concatenate([PASSAGES[:150], PASSAGES[:10]])  # ten pairs of equals
    if not (tmp_path / faiss_build.INDEX_FILE).exists():
        write_vector_index(tmp_path, "Flat", passages)
    queries = draw_unit_vectors(batch, seed)
    scores, rows = VectorIndex(tmp_path, RetrieverSettings()).search(queries, topk)
    exact = queries @ passages.T
    assert scores == pytest.approx(-np.sort(-exact, axis=1)[:, :topk], abs=1e-5)
    assert np.take_along_axis(exact, rows, 1) == pytest.approx(scores, abs=1e-5)
    assert all(len(set(own)) == topk for own in rows.tolist())


@pytest.mark.parametrize("factory", KINDS)
def test_every_index_type_finds_nearly_all_neighbours(built: Built, factory: str) -> None:
    scores, rows = built(factory).search(QUERIES, 10, effort=WIDE)
    assert measure_overlap(rows, rank_best(QUERIES, 10)) > 0.95
    assert (np.diff(scores, axis=1) <= 1e-6).all()


@pytest.mark.parametrize("factory", LOSSY)
def test_refinement_finds_neighbours_that_codes_alone_miss(built: Built, factory: str) -> None:
    wanted = rank_best(QUERIES, 3)
    alone = measure_overlap(built(factory).search(QUERIES, 3, effort=Effort(128, 32, refine=1))[1], wanted)
    scores, rows = built(factory).search(QUERIES, 3, effort=WIDE)
    assert alone < 0.95 < 0.97 <= measure_overlap(rows, wanted)
    assert scores == pytest.approx(np.take_along_axis(QUERIES @ PASSAGES.T, rows, 1), abs=1e-3)  # of float16 vectors


@pytest.mark.parametrize(
    ("exact_rows", "passing"),
    [(0, 7), (0, 400), (0, COUNT), (vector_index.EXACT_ROWS, 1), (vector_index.EXACT_ROWS, 3600)],
)
@pytest.mark.parametrize("factory", KINDS)
def test_a_filter_keeps_the_best_passing_rows(
    built: Built, monkeypatch: pytest.MonkeyPatch, factory: str, passing: int, exact_rows: int
) -> None:
    monkeypatch.setattr(vector_index, "EXACT_ROWS", exact_rows)
    mask = np.zeros(COUNT, np.bool_)
    mask[np.random.default_rng(4).permutation(COUNT)[:passing]] = True
    _, rows = built(factory).search(QUERIES, 10, mask, WIDE)
    assert rows.shape == (len(QUERIES), min(10, passing))
    assert mask[rows].all()
    assert (rows >= 0).all()
    assert measure_overlap(rows, rank_best(QUERIES, min(10, passing), mask)) > 0.93


@pytest.mark.parametrize("factory", KINDS)
def test_a_filter_without_passing_rows_finds_nothing(built: Built, factory: str) -> None:
    assert built(factory).search(QUERIES, 10, np.zeros(COUNT, np.bool_))[1].shape == (len(QUERIES), 0)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), topk=st.integers(1, 50), batch=st.integers(1, 12))
def test_any_filter_on_a_flat_index_equals_brute_force(
    built: Built, data: st.DataObject, topk: int, batch: int
) -> None:
    share = data.draw(st.floats(0, 1))
    mask = np.random.default_rng(data.draw(st.integers(0, 1000))).random(COUNT) < share
    queries = draw_unit_vectors(batch, seed=data.draw(st.integers(0, 1000)))
    passing = int(mask.sum())
    _, rows = built("Flat").search(queries, topk, mask)
    exact = np.where(mask, queries @ PASSAGES.T, -np.inf)
    assert all(len(set(own)) == min(topk, passing) for own in rows.tolist())
    # Scores, not rows: of two that differ by rounding alone, either may come first.
    assert np.take_along_axis(exact, rows, 1) == pytest.approx(-np.sort(-exact, axis=1)[:, : rows.shape[1]], abs=1e-6)


def test_search_parameters_do_not_change_the_index(built: Built) -> None:
    index = built("IVF32,Flat")
    index.search(QUERIES, 5)
    assert faiss.downcast_index(index._index).nprobe == 1


@pytest.mark.parametrize(
    ("factory", "effort", "more"),
    [("HNSW16", Effort(2, 1, 1), Effort(200, 1, 1)), ("IVF32,Flat", Effort(1, 1, 1), Effort(1, 32, 1))],
)
def test_more_effort_finds_more(built: Built, factory: str, effort: Effort, more: Effort) -> None:
    wanted = rank_best(QUERIES, 1)
    little, much = (measure_overlap(built(factory).search(QUERIES, 1, effort=of)[1], wanted) for of in (effort, more))
    assert little < 0.98 < 0.99 <= much


@pytest.mark.parametrize("factory", ["RaBitQ8", "RR64,RaBitQ8", "SQ8", "Flat"])
def test_a_filter_changes_no_score(built: Built, factory: str) -> None:
    """Few rows that pass are scored one by one, by vectors that the index must give back as it searches them."""
    index, mask = built(factory), np.zeros(COUNT, bool)
    assert not index.stores_vectors
    scores, rows = index.search(QUERIES, 5)
    mask[rows] = True
    filtered, same = index.search(QUERIES, 5, mask)
    assert (same == rows).mean() > 0.9
    np.testing.assert_allclose(filtered, scores, atol=1e-3)


def test_no_more_passages_are_found_than_there_are(tmp_path: Path) -> None:
    index = VectorIndex(write_vector_index(tmp_path, "Flat", PASSAGES[:4]), RetrieverSettings())
    assert [sorted(rows) for rows in index.search(QUERIES[:2], 100)[1].tolist()] == [[0, 1, 2, 3]] * 2
    assert index.search(QUERIES[:0], 3)[1].shape == (0, 3)


@pytest.mark.parametrize("factory", ["PQ16x4fs", "RaBitQ", "IVF32,Flat", "Flat"])
def test_exact_rows_are_those_of_the_vectors(built: Built, monkeypatch: pytest.MonkeyPatch, factory: str) -> None:
    monkeypatch.setattr(vector_index, "_BLOCK_ROWS", 999)
    rows = built(factory).search_exact(QUERIES, 10)
    if factory == "IVF32,Flat":  # does not know where a row is
        assert rows is None
    else:
        assert rows is not None
        assert measure_overlap(rows, rank_best(QUERIES, 10)) > 0.99


def test_an_index_is_mapped_not_copied(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((40_000, 256)).astype(np.float32)
    folder = write_vector_index(tmp_path, "Flat", vectors)
    before = measure_private_bytes()
    index = VectorIndex(folder, RetrieverSettings())
    index.search(vectors[:1], 1)
    assert index.passages == 40_000
    assert measure_private_bytes() - before < vectors.nbytes / 4


def measure_private_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


@pytest.mark.parametrize("factory", ["Flatt", "", "PQ7", "os.system"])
def test_a_factory_string_that_faiss_refuses_names_the_setting(factory: str) -> None:
    with pytest.raises(SettingsError, match=r"retriever.faiss_factory"):
        faiss_build.create_index(factory, DIMENSION)


@pytest.mark.parametrize("factory", ["IVF256,Flat", "IVF0,Flat"])
def test_a_factory_string_that_does_not_fit_the_corpus_names_the_setting(factory: str) -> None:
    index = faiss_build.create_index(factory, DIMENSION)
    with pytest.raises(SettingsError, match=f"'{factory}' does not fit the corpus"):
        fill(index, factory, PASSAGES[:6])


def test_a_damaged_index_names_its_file(tmp_path: Path) -> None:
    file = tmp_path / faiss_build.INDEX_FILE
    file.write_bytes(b"not an index")
    with pytest.raises(UserError, match=r"index.faiss cannot be read.*build it again"):
        VectorIndex(tmp_path, RetrieverSettings())


def test_refinement_without_vectors_names_the_setting(tmp_path: Path) -> None:
    write_vector_index(tmp_path, "Flat", PASSAGES[:10])
    with pytest.raises(SettingsError, match=r"retriever.refine is 10.*stores no vectors"):
        VectorIndex(tmp_path, RetrieverSettings(refine=10))


@pytest.mark.parametrize(
    ("factory", "wanted"),
    [
        ("Flat", False),
        ("SQ8", False),
        ("HNSW32", False),
        ("IVF16,SQ8", False),
        ("SQ4", True),
        ("PCA16,Flat", True),
        ("HNSW32_SQ4", True),
        ("IVF16,PQ16x4fs", True),
        ("RaBitQ", True),
        ("PQ16x4fs,RFlat", False),
    ],
)
def test_vectors_are_stored_for_codes_of_less_than_a_byte_per_dimension(factory: str, wanted: bool) -> None:
    assert faiss_build.needs_stored_vectors(factory, DIMENSION) is wanted
