"""Index files written piece by piece are those that FAISS writes, byte for byte, also after kills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from numpy.typing import NDArray

from forage_retriever.search import faiss_cut, faiss_stream, memory, row_files, vectors

DIMENSION, COUNT = 32, 3000
FLAT = ["Flat", "SQ8", "SQ4", "SQ6", "SQfp16", "SQbf16"]
LISTS = [
    *("IVF16,Flat", "IVF700,Flat", "IVF16,SQ8", "IVF16,SQfp16", "IVF16,PQ4x4np", "IVF16,RaBitQ"),
    *("IVF16,RaBitQ4", "IVF64_HNSW8,SQ8", "OPQ4_16,IVF16,PQ4x4np", "PCA16,IVF16,SQ8"),
]
WHOLE = ["HNSW8", "IVF16,SQ8,RFlat", "IVF16,PQ4x4fs", "PQ4x4", "RaBitQ", "PCA16,SQ8"]


@pytest.fixture(scope="module")
def data() -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal((COUNT, DIMENSION)).astype(np.float32)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    faiss.omp_set_num_threads(1)
    monkeypatch.setattr(vectors, "_BLOCK_BYTES", 4 * DIMENSION * 777)
    monkeypatch.setattr(faiss_stream, "_COUNTED_BYTES", 4 * DIMENSION * 250)
    monkeypatch.setattr(faiss_stream, "SORTED_BYTES", 20_000)


def train(factory: str, data: NDArray[np.float32]) -> Any:
    index = faiss.index_factory(DIMENSION, factory, faiss.METRIC_INNER_PRODUCT)
    index.train(data[:1000])
    return index


def write_by_faiss(index: Any, data: NDArray[np.float32], file: Path) -> bytes:
    index = faiss.clone_index(index)
    for begin in range(0, len(data), 250):  # a projection of more rows at once is rounded otherwise
        index.add(data[begin : begin + 250])
    faiss.write_index(index, str(file))
    return file.read_bytes()


@pytest.mark.parametrize("factory", FLAT)
def test_flat_files_are_those_of_faiss_and_are_cut(factory: str, data: NDArray[np.float32], tmp_path: Path) -> None:
    index = train(factory, data)
    seen: list[int] = []
    faiss_stream.write_flat(index, data, tmp_path / "streamed", seen.append)
    assert (tmp_path / "streamed").read_bytes() == write_by_faiss(index, data, tmp_path / "whole")
    assert seen[-1] == COUNT
    faiss_cut.cut_rows(tmp_path / "whole", 1111, 2345, tmp_path / "cut", seen.append)
    assert (tmp_path / "cut").read_bytes() == write_by_faiss(index, data[1111:2345], tmp_path / "part")
    assert seen[-1] == 2345 - 1111


@pytest.mark.parametrize("factory", LISTS)
def test_inverted_files_are_those_of_faiss(factory: str, data: NDArray[np.float32], tmp_path: Path) -> None:
    index = train(factory, data)
    assert faiss_stream.is_inverted(index)
    faiss_stream.encode_into_cells(index, data, tmp_path, "key", lambda done: None)
    faiss_stream.write_inverted(index, tmp_path, tmp_path / "streamed", lambda done: None)
    assert (tmp_path / "streamed").read_bytes() == write_by_faiss(index, data, tmp_path / "whole")
    assert index.ntotal == 0


def test_codes_are_resumed_from_the_last_checkpoint(
    data: NDArray[np.float32], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = train("IVF16,SQ8", data)
    monkeypatch.setattr(row_files, "CHECKPOINT_S", 0.0)
    begun: list[int] = []

    def kill(done: int) -> None:
        begun.append(done)
        if len(begun) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        faiss_stream.encode_into_cells(index, data, tmp_path, "key", kill)
    with (tmp_path / faiss_stream.CODES_FILE).open("ab") as file:  # of a block that a kill cut off
        file.write(b"garbage")
    faiss_stream.encode_into_cells(index, data, tmp_path, "key", begun.append)
    assert begun == [*range(250, 1251, 250), *range(1500, COUNT + 1, 250)]
    faiss_stream.write_inverted(index, tmp_path, tmp_path / "streamed", lambda done: None)
    assert (tmp_path / "streamed").read_bytes() == write_by_faiss(index, data, tmp_path / "whole")


@pytest.mark.parametrize("factory", [*FLAT, *LISTS, *WHOLE])
def test_the_estimate_of_memory_knows_what_is_streamed(factory: str) -> None:
    index = faiss.index_factory(768, factory, faiss.METRIC_INNER_PRODUCT)
    needs = memory.estimate_needs(factory, 768, 21_015_324)
    streamed = faiss_stream.is_flat(index) or faiss_stream.is_inverted(index)
    assert streamed == (factory not in WHOLE)
    assert (needs.build_bytes < needs.held_bytes + 4 * memory.GIB) == (streamed or needs.ram_bytes < 4 * memory.GIB)
    assert (needs.scratch_bytes > 0) == faiss_stream.is_inverted(index)
