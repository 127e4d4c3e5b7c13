"""Indexes divided over devices: the code that splits, moves, searches and merges, on copies of FAISS's CPU classes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from numpy.typing import NDArray

from forage_retriever.search import faiss_build, faiss_gpu
from forage_retriever.search.vector_index import VectorIndex
from forage_retriever.search.vectors import VECTORS_FILE
from forage_runtime.errors import UserError
from forage_runtime.settings import RetrieverSettings

DIMENSION, COUNT, CELLS = 32, 3000, 16
GIB = 2**30
Vectors = NDArray[np.float32]
faiss.omp_set_num_threads(1)  # several would wait for each other at each of many small steps


def draw_unit_vectors(count: int, seed: int) -> Vectors:
    vectors = np.random.default_rng(seed).standard_normal((count, DIMENSION)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


PASSAGES, QUERIES = draw_unit_vectors(COUNT, seed=1), draw_unit_vectors(20, seed=2)


class Twins:
    """Devices that are copies on the CPU; remembers which thread called each, and the rows that it was given."""

    halves = True

    def __init__(self, count: int, free: int = 100 * GIB) -> None:
        self.count = count
        self.free = free
        self.callers: list[set[int]] = [set() for _ in range(count)]
        self.moved: list[int] = []

    def measure_free(self, device: int) -> int:
        faiss.omp_set_num_threads(1)  # of this thread
        self.callers[device].add(threading.get_ident())
        return self.free

    def create_flat(self, device: int, dimension: int) -> Any:
        """As GPUs keep them: vectors in half precision, products in float32."""
        self.callers[device].add(threading.get_ident())
        return self._watch(
            device, faiss.IndexScalarQuantizer(dimension, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT)
        )

    def move(self, device: int, index: Any) -> Any:
        self.callers[device].add(threading.get_ident())
        self.moved.append(int(index.ntotal))
        copy = faiss.clone_index(index)
        if isinstance(copy, faiss.IndexHNSW):
            copy.hnsw.efSearch = 128
        return self._watch(device, copy)

    def _watch(self, device: int, index: Any) -> Any:
        search = index.search

        def watched(*arguments: Any, **named: Any) -> Any:
            self.callers[device].add(threading.get_ident())
            return search(*arguments, **named)

        index.search = watched
        return index


def build(factory: str, vectors: Vectors = PASSAGES) -> Any:
    index = faiss_build.create_index(factory, DIMENSION)
    if not index.is_trained:
        index.train(vectors)
    index.add(vectors)
    return index


def build_cagra() -> Any:
    """A graph of CAGRA's kind, as `GpuIndexCagra.copyTo` leaves it on the CPU."""
    index = faiss.IndexHNSWCagra(DIMENSION, 16, faiss.METRIC_INNER_PRODUCT)
    index.add(PASSAGES)
    return index


def write(folder: Path, index: Any) -> Path:
    folder.mkdir(exist_ok=True)
    faiss_build.write_index(index, folder / faiss_build.INDEX_FILE)
    return folder


def open_both(folder: Path, places: Twins) -> tuple[VectorIndex, VectorIndex]:
    """The same index on the CPU, and divided."""
    settings = RetrieverSettings(threads=1, nprobe=CELLS)
    return VectorIndex(folder, settings), VectorIndex(folder, settings, places)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "factory",
    ["Flat", "SQfp16", f"IVF{CELLS},Flat", f"IVF{CELLS},SQ8", f"IVF{CELLS},SQfp16", f"IVF{CELLS}_HNSW8,Flat",
     f"PCA{DIMENSION},IVF{CELLS},Flat", f"IVF{CELLS},PQ16x4np"],
)  # fmt: skip
def test_a_divided_index_finds_what_the_whole_one_finds(tmp_path: Path, factory: str, count: int) -> None:
    places = Twins(count)
    whole, divided = open_both(write(tmp_path, build(factory)), places)
    assert (whole.gpus, divided.gpus) == (0, count)
    for topk in (1, 10, 200):
        scores, rows = divided.search(QUERIES, topk)
        wanted_scores, wanted = whole.search(QUERIES, topk)
        assert scores == pytest.approx(wanted_scores, abs=1e-5)
        # Of codes that are equal, or that differ by rounding alone, either may come first.
        assert (rows == wanted).mean() > (0.99 if topk < 200 else 0.98)
    if "IVF" in factory:
        assert sum(places.moved) == COUNT, "each row is on one device"
        assert max(places.moved) - min(places.moved) <= 1


def test_flat_scores_of_halves_are_made_exact_again(tmp_path: Path) -> None:
    """Near neighbours that half precision cannot tell apart."""
    chance = np.random.default_rng(3)
    crowd = np.repeat(PASSAGES[:50], 20, axis=0) + 2e-4 * chance.standard_normal((1000, DIMENSION)).astype(np.float32)
    folder = write(tmp_path, build("Flat", crowd))
    whole, divided = open_both(folder, Twins(3))
    wanted_scores, wanted = whole.search(QUERIES, 5)
    scores, rows = divided.search(QUERIES, 5)
    assert (rows == wanted).all()
    assert scores == pytest.approx(wanted_scores, abs=1e-6)
    raw = divided._gpu
    assert raw is not None
    assert (raw.search(QUERIES, 5, 1, 1)[1] != wanted).any(), "the test would not show anything"


def test_a_graph_is_copied_to_every_device_and_queries_are_shared(tmp_path: Path) -> None:
    places = Twins(3)
    whole, divided = open_both(write(tmp_path, build_cagra()), places)
    for queries in (QUERIES, QUERIES[:1], QUERIES[:2]):
        assert (divided.search(queries, 5)[1] == whole.search(queries, 5)[1]).mean() > 0.95
    assert places.moved == [COUNT] * 3


def test_each_device_has_one_thread_of_its_own(tmp_path: Path) -> None:
    places = Twins(3)
    _, divided = open_both(write(tmp_path, build(f"IVF{CELLS},Flat")), places)
    results: list[list[list[int]]] = []
    callers = [
        threading.Thread(target=lambda: results.append(divided.search(QUERIES, 10)[1].tolist())) for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == [results[0]] * 4
    owners = set().union(*places.callers)
    assert [len(own) for own in places.callers] == [1, 1, 1]
    assert len(owners) == 3
    assert owners.isdisjoint({caller.ident for caller in callers} | {threading.get_ident()})


@pytest.mark.parametrize("factory", ["Flat", f"IVF{CELLS},SQ8"])
def test_filters_are_searched_on_the_cpu(tmp_path: Path, factory: str) -> None:
    places = Twins(2)
    whole, divided = open_both(write(tmp_path, build(factory)), places)
    mask = np.zeros(COUNT, np.bool_)
    mask[::3] = True
    seen = [set(own) for own in places.callers]
    for places_own in places.callers:
        places_own.clear()
    scores, rows = divided.search(QUERIES, 10, mask)
    assert seen != [set(), set()]
    assert places.callers == [set(), set()]
    assert (rows == whole.search(QUERIES, 10, mask)[1]).all()
    assert (rows % 3 == 0).all()
    assert np.isfinite(scores).all()


def test_more_neighbours_than_a_gpu_gives_are_found_on_the_cpu(tmp_path: Path) -> None:
    _, divided = open_both(write(tmp_path, build("Flat")), Twins(2))
    assert (np.sort(divided.search(QUERIES[:2], COUNT)[1], axis=1) == np.arange(COUNT)).all()


def test_fewer_vectors_than_devices(tmp_path: Path) -> None:
    for factory in ("Flat", "IVF1,Flat"):
        whole, divided = open_both(write(tmp_path, build(factory, PASSAGES[:2])), Twins(4))
        assert divided.gpus == 2
        assert (divided.search(QUERIES, 10)[1] == whole.search(QUERIES, 10)[1]).all()


def test_vectors_that_are_stored_are_refined_from_as_on_the_cpu(tmp_path: Path) -> None:
    folder = write(tmp_path, build(f"IVF{CELLS},PQ8x4np"))
    np.save(folder / VECTORS_FILE, PASSAGES.astype(np.float16))
    whole, divided = open_both(folder, Twins(2))
    assert divided.gpus == 2
    assert (divided.search(QUERIES, 3)[1] == whole.search(QUERIES, 3)[1]).all()


@pytest.mark.parametrize(
    ("factory", "free", "reason"),
    [
        ("HNSW16", 100 * GIB, "IndexHNSWFlat is not searched on GPUs: Flat, SQfp16, IVF with"),
        (f"IVF{CELLS},RaBitQ", 100 * GIB, "IndexIVFRaBitQ is not searched on GPUs"),
        ("PQ16x4fs,RFlat", 100 * GIB, "IndexRefineFlat is not searched on GPUs"),
        ("Flat", GIB // 2, r"needs 1.0 GiB on each of 2 GPUs, and 0.5 GiB of GPU 0 are free"),
        (f"IVF{CELLS},SQ8", GIB // 2, r"needs 1.0 GiB on each of 2 GPUs"),
    ],
)
def test_what_cannot_be_moved_stays_on_the_cpu_unless_a_gpu_is_demanded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], factory: str, free: int, reason: str
) -> None:
    folder = write(tmp_path, build(factory))
    index = VectorIndex(folder, RetrieverSettings(threads=1, nprobe=CELLS), Twins(2, free))
    assert index.gpus == 0
    assert index.search(QUERIES, 3)[1].shape == (20, 3)
    with pytest.raises(UserError, match=f"retriever.device is gpu, and the index cannot be moved there .*{reason}"):
        faiss_gpu.move_index(build(factory), Twins(2, free), demanded=True)


def test_memory_is_that_of_the_largest_part() -> None:
    class Large(faiss.IndexFlatIP):  # type: ignore[misc]
        """21 million vectors of 768, of which only the size is asked."""

        ntotal = 21_015_324

    flat = Large(768)
    assert faiss_gpu.estimate_bytes(flat, 1) / GIB == pytest.approx(30.06 + 1, abs=0.01)
    assert faiss_gpu.estimate_bytes(flat, 4) / GIB == pytest.approx(30.06 / 4 + 1, abs=0.01)
    quantizer = faiss.IndexFlatIP(DIMENSION)
    cells = faiss.IndexIVFScalarQuantizer(quantizer, DIMENSION, CELLS, faiss.ScalarQuantizer.QT_8bit)
    before = faiss_gpu.estimate_bytes(cells, 1)
    cells.train(PASSAGES)
    cells.add(PASSAGES)
    assert faiss_gpu.estimate_bytes(cells, 1) - before == pytest.approx(1.1 * COUNT * (DIMENSION + 8), rel=0.01)


def test_a_quantizer_that_is_a_graph_is_as_before_after_a_move() -> None:
    index = build(f"IVF{CELLS}_HNSW8,Flat")
    before = index.search(QUERIES, 3)[1]
    assert faiss_gpu.move_index(index, Twins(2), demanded=True) is not None
    assert isinstance(faiss.downcast_index(index.quantizer), faiss.IndexHNSW)
    assert (index.search(QUERIES, 3)[1] == before).all()
