"""Real vectors beside as many made ones: how near questions are to passages, and what approximate searches find.

    FORAGE_BENCH_DATA=folder .venvs/retriever/bin/python lab/benchmarks/retriever/large_compare.py

Prints the columns that `large_vectors.py` shows, of MiniLM's vectors of the data and of made ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import faiss
import numpy as np
from faiss_types import encode_real_vectors
from large_vectors import Maker, Vectors
from numpy.typing import NDArray
from questions import load
from rich.console import Console
from rich.table import Table

from forage_retriever.command.evaluate import compute_overlap
from forage_retriever.search import faiss_build

RANKS = (1, 3, 10, 100)
PROBES, EFFORTS, DEPTHS = (1, 4, 8), (10, 20, 40), (3, 10, 40)
TOPK = 3


def main() -> None:
    real, asked = encode_real_vectors(load())
    maker = Maker()
    made = maker.draw_block(0, len(real))
    chosen = np.random.default_rng(5).permutation(len(made) - 1)[: len(asked)]
    columns = [describe(real, asked), describe(made, maker.draw_questions(made[chosen], made[chosen + 1]))]
    table = Table(title=f"{len(real):,} vectors, {len(asked)} questions")
    for column in ("", f"real, {real.shape[1]} dimensions", f"made, {made.shape[1]} dimensions"):
        table.add_column(column, justify="right" if column else "left")
    for (name, left), (_, right) in zip(*columns, strict=True):
        table.add_row(name, f"{left:.3f}", f"{right:.3f}")
    Console(width=80).print(table)


def describe(vectors: Vectors, questions: Vectors) -> list[tuple[str, float]]:
    """Mean cosines, and the share of the exact top 3 that each search finds."""
    faiss.omp_set_num_threads(1)
    products = questions @ vectors.T
    order = np.argsort(-products, axis=1)[:, : max(RANKS)]
    cosines = np.take_along_axis(products, order, 1).mean(axis=0)
    rows = [(f"cosine of passage {rank}", float(cosines[rank - 1])) for rank in RANKS]
    return rows + [(name, float(found)) for name, found in _search(vectors, questions, order[:, :TOPK])]


def _search(vectors: Vectors, questions: Vectors, exact: NDArray[Any]) -> Iterator[tuple[str, float]]:
    dimension = vectors.shape[1]
    cells = int(2 * math.sqrt(len(vectors)))
    index = _build(f"IVF{cells},Flat", vectors)
    for nprobe in PROBES:
        found = index.search(questions, TOPK, params=faiss.SearchParametersIVF(nprobe=nprobe))[1]
        yield f"IVF{cells}, nprobe {nprobe}", compute_overlap(found, exact)
    index = _build("HNSW8", vectors)
    for effort in EFFORTS:
        found = index.search(questions, 10, params=faiss.SearchParametersHNSW(efSearch=effort))[1]
        yield f"HNSW8, efSearch {effort}", compute_overlap(found[:, :TOPK], exact)
    index = _build(f"PQ{dimension // 4}x4fs", vectors)
    for depth in DEPTHS:
        yield f"PQ, best {depth}", compute_overlap(index.search(questions, depth)[1], exact)


def _build(factory: str, vectors: Vectors) -> Any:
    index = faiss_build.create_index(factory, vectors.shape[1])
    faiss_build.train_index(index, factory, vectors)
    faiss_build.add_vectors(index, factory, vectors)
    return index


if __name__ == "__main__":
    main()
