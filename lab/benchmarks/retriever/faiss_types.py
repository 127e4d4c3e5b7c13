"""Memory, speed and recall of FAISS index types over a million vectors: tables, then JSON (`make bench-faiss`).

    .venvs/retriever/bin/python lab/benchmarks/retriever/faiss_types.py [PASSAGES] [FACTORY …]

Vectors are MiniLM's of the passages in FORAGE_BENCH_DATA (`corpus.jsonl.gz`, `queries.jsonl.gz`; the world facts when
unset), enlarged to PASSAGES (1,000,000): each further vector lies between a real one and one of its eight nearest, at
most half the way, with noise of a third of a vector's length, made unit length again, so clusters stay clusters and
become denser. Queries are the real questions. Indexes are built once, into `.cache/bench`; building all of them takes
half an hour and more, HNSW most of it. Queries are counted in a second of one processor core.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray
from questions import CACHE, Data
from questions import load as load_data
from rich.console import Console
from rich.table import Table

from forage_retriever.command.bench import measure_throughput
from forage_retriever.command.evaluate import compute_overlap
from forage_retriever.corpus import read
from forage_retriever.encoders.factory import create_encoder
from forage_retriever.search import faiss_build, memory
from forage_retriever.search.vector_index import Effort, VectorIndex
from forage_retriever.search.vectors import VECTORS_FILE, iterate_blocks, save_vectors
from forage_runtime.settings import RetrieverSettings

Vectors = NDArray[np.float32]
PASSAGES = 1_000_000
QUERIES = 512
SECONDS = 2.0
FAISS_BLAS_THRESHOLD = 128_000
"""The default of FAISS 1.15."""

NEIGHBOURS, REACH, NOISE = 8, 0.5, 0.35
BLOCK = 50_000
TRAINING = 100_000
WIKI18_PASSAGES, WIKI18_DIMENSION = 21_015_324, 768
TYPES: tuple[tuple[str, Effort], ...] = (
    ("Flat", Effort(1, 1, 0)),
    ("SQfp16", Effort(1, 1, 0)),
    ("HNSW32", Effort(16, 1, 0)),
    ("HNSW32", Effort(128, 1, 0)),
    ("HNSW32", Effort(512, 1, 0)),
    ("IVF4096,SQ8", Effort(1, 8, 0)),
    ("IVF4096,SQ8", Effort(1, 32, 0)),
    ("IVF4096,SQ8", Effort(1, 128, 0)),
    ("IVF4096,PQ96x4fs", Effort(1, 32, 1)),
    ("IVF4096,PQ96x4fs", Effort(1, 32, 0)),
    ("IVF4096,PQ96x4fs", Effort(1, 128, 0)),
    ("IVF4096,RaBitQ", Effort(1, 32, 0)),
    ("IVF4096,RaBitQ", Effort(1, 128, 0)),
    ("IVF4096,RaBitQfs", Effort(1, 128, 0)),
    ("RaBitQ", Effort(1, 1, 1)),
    ("RaBitQ", Effort(1, 1, 0)),
    ("RaBitQfs", Effort(1, 1, 0)),
)


def main(passages: int, only: Sequence[str]) -> None:
    """Build missing indexes, measure, print."""
    faiss.omp_set_num_threads(os.cpu_count() or 1)
    data = load_data()
    real, queries = encode_real_vectors(data)
    folder = CACHE / f"faiss-{_format_file_name(data)}-{passages}"
    vectors = enlarge(real, passages, folder / "all.npy")
    console = Console(stderr=True)
    chosen = [(factory, effort) for factory, effort in TYPES if not only or factory in only]
    for factory in dict.fromkeys(factory for factory, _ in (("Flat", None), *chosen)):
        begin = time.monotonic()
        if build_missing(folder / factory, factory, vectors):
            console.print(f"built {factory} in {time.monotonic() - begin:.0f} s")
    settings = RetrieverSettings(threads=1)
    exact = VectorIndex(folder / "Flat", settings).search(queries, 10)[1]
    rows = [measure(folder, factory, effort, queries, exact, settings) for factory, effort in chosen]
    default = measure_default_flat(folder, queries)
    table = Table(title=f"{passages:,} vectors of {vectors.shape[1]} dimensions, {len(queries)} questions, 1 thread")
    for title in (
        "type",
        "efSearch, nprobe",
        "refined",
        "RAM B/vector",
        "q/CPU s, 1",
        "q/CPU s, 32",
        "top-3",
        "top-10",
    ):
        table.add_column(title, justify="left" if title == "type" else "right")
    for row in (default, *rows):
        table.add_row(*format_row(row))
    Console(width=120).print(table)
    print_projection()
    tuned = next((row for row in rows if row["type"] == "Flat"), None)
    report = {
        "passages": passages,
        "flat_tuned_ratio_batch_32": tuned and round(tuned["qps_32"] / default["qps_32"], 2),
        "types": [default, *rows],
    }
    print(json.dumps(report))


def encode_real_vectors(data: Data) -> tuple[Vectors, Vectors]:
    """Encode the passages and some questions, unless their vectors are cached."""
    files = [CACHE / f"vectors-{_format_file_name(data)}-{part}.npy" for part in ("passages", "questions")]
    if not all(file.exists() for file in files):
        CACHE.mkdir(parents=True, exist_ok=True)
        model = create_encoder(RetrieverSettings(threads=os.cpu_count() or 1), building=True)
        texts = [passage.contents for passage in read.read_passages(data.corpus)]
        np.save(files[0], model.encode_passages(texts, lambda done: None))
        np.save(files[1], model.encode_queries([question.text for question in data.questions]))
    passages, questions = (np.load(file) for file in files)
    return passages, questions[np.random.default_rng(0).permutation(len(questions))[:QUERIES]]


def _format_file_name(data: Data) -> str:
    return data.name.replace(" ", "-")


def enlarge(real: Vectors, passages: int, file: Path) -> NDArray[np.float32]:
    """Add synthetic vectors to the real ones, as the module describes. Returns them mapped into memory."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        chance = np.random.default_rng(0)
        flat = faiss.IndexFlatIP(real.shape[1])
        flat.add(real)
        near = flat.search(real, NEIGHBOURS + 1)[1][:, 1:]
        temporary = file.with_suffix(".tmp")
        out = np.lib.format.open_memmap(temporary, "w+", np.float32, (passages, real.shape[1]))
        out[: len(real)] = real[:passages]
        for begin in range(len(real), passages, BLOCK):
            count = min(BLOCK, passages - begin)
            one = chance.integers(0, len(real), count)
            other = near[one, chance.integers(0, NEIGHBOURS, count)]
            share = chance.uniform(0, REACH, (count, 1)).astype(np.float32)
            vectors = (1 - share) * real[one] + share * real[other]
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            noise = chance.standard_normal(vectors.shape, np.float32)
            vectors += NOISE * noise / np.linalg.norm(noise, axis=1, keepdims=True)
            out[begin : begin + count] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        out.flush()
        temporary.rename(file)
    return np.load(file, mmap_mode="r")


def build_missing(folder: Path, factory: str, vectors: NDArray[np.float32]) -> bool:
    """Build the index unless it exists. Returns whether it was built."""
    file = folder / faiss_build.INDEX_FILE
    if file.exists():
        return False
    folder.mkdir(parents=True, exist_ok=True)
    index = faiss_build.create_index(factory, vectors.shape[1])
    if wanted := min(faiss_build.count_training_rows(index, len(vectors)), TRAINING):
        chosen = np.sort(np.random.default_rng(0).permutation(len(vectors))[:wanted])
        inner = faiss_build.unwrap_index(index)
        centroids = folder.parent / f"centroids-{inner.nlist}.npy" if isinstance(inner, faiss.IndexIVF) else None
        if centroids is not None and centroids.exists():
            inner.quantizer.add(np.load(centroids))  # the same cells for all types that have so many
        faiss_build.train_index(index, factory, vectors[chosen])
        if centroids is not None and not centroids.exists():
            np.save(centroids, inner.quantizer.reconstruct_n(0, inner.nlist))
    for block in iterate_blocks(vectors):
        faiss_build.add_vectors(index, factory, block)
    if faiss_build.needs_stored_vectors(factory, vectors.shape[1]):
        shared = folder.parent / "float16.npy"
        if not shared.exists():
            save_vectors(vectors, shared, "<f2")
        if not (folder / VECTORS_FILE).exists():
            os.link(shared, folder / VECTORS_FILE)
    faiss_build.write_index(index, folder / "index.tmp")
    (folder / "index.tmp").rename(file)
    return True


def measure(
    root: Path, factory: str, effort: Effort, queries: Vectors, exact: NDArray[Any], settings: RetrieverSettings
) -> dict[str, Any]:
    """Measure an index type. Returns its row of the table."""
    begin = time.monotonic()
    index = VectorIndex(root / factory, settings)
    ready_s = time.monotonic() - begin
    nearest = index.search(queries, 10, effort=effort)[1]
    top3 = index.search(queries, 3, effort=effort)[1]
    search = partial(index.search, topk=3, effort=effort)
    refined = effort.refine != 1 and (root / factory / VECTORS_FILE).exists()
    return {
        "type": factory,
        "effort": effort.ef_search if index.has_graph else effort.nprobe if index.cells else None,
        "refined": refined,
        "ram_bytes": round((root / factory / faiss_build.INDEX_FILE).stat().st_size / index.passages, 1),
        "qps_1": measure_cpu_qps(search, queries, 1),
        "qps_32": measure_cpu_qps(search, queries, 32),
        "top3": round(compute_overlap(top3, exact[:, :3]), 4),
        "top10": round(compute_overlap(nearest, exact), 4),
        "ready_s": round(ready_s, 2),
    }


def measure_cpu_qps(search: Callable[[Vectors], object], queries: Vectors, batch: int) -> float:
    """Measure queries a second of processor time, which depends less on other processes than wall-clock time."""
    return round(1000 / measure_throughput(search, queries, batch, SECONDS)["cpu_ms"], 1)


def measure_default_flat(root: Path, queries: Vectors) -> dict[str, Any]:
    """Measure FAISS's own flat search: IndexFlatIP with default settings."""
    index = faiss_build.read_index(root / "Flat" / faiss_build.INDEX_FILE)
    faiss.omp_set_num_threads(1)
    tuned = faiss.cvar.distance_compute_blas_threshold
    faiss.cvar.distance_compute_blas_threshold = FAISS_BLAS_THRESHOLD
    try:
        qps_1, qps_32 = (measure_cpu_qps(lambda batch: index.search(batch, 3), queries, size) for size in (1, 32))
    finally:
        faiss.cvar.distance_compute_blas_threshold = tuned
    size = round((root / "Flat" / faiss_build.INDEX_FILE).stat().st_size / index.ntotal, 1)
    return {
        "type": "Flat, FAISS's defaults",
        "ram_bytes": size,
        "qps_1": qps_1,
        "qps_32": qps_32,
        "top3": 1,
        "top10": 1,
    }


def format_row(row: dict[str, Any]) -> list[str]:
    """A row as text."""
    return [
        row["type"],
        str(row.get("effort") or ""),
        "yes" if row.get("refined") else "",
        f"{row['ram_bytes']:.0f}",
        f"{row['qps_1']:,.0f}",
        f"{row['qps_32']:,.0f}",
        f"{row['top3']:.4f}",
        f"{row['top10']:.4f}",
    ]


def print_projection() -> None:
    """Print the size of wiki-18 by the formulas that tests check against FAISS's files; no speed or recall."""
    table = Table(title=f"wiki-18, projected: {WIKI18_PASSAGES:,} passages of {WIKI18_DIMENSION} dimensions, GiB")
    for title in ("type", "RAM", "of which own", "stored vectors, on disk", "to build"):
        table.add_column(title, justify="left" if title == "type" else "right")
    for factory in ("Flat", "SQfp16", "HNSW32", "IVF16384,SQ8", "IVF16384,RaBitQ", "IVF16384,PQ192x4fs", "RaBitQ"):
        cost = memory.estimate_needs(factory, WIKI18_DIMENSION, WIKI18_PASSAGES)
        sizes = (cost.ram_bytes, cost.held_bytes, cost.vectors_bytes, cost.build_bytes)
        table.add_row(factory, *(f"{size / memory.GIB:.1f}" for size in sizes))
    Console(width=120).print(table)


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else PASSAGES, sys.argv[2:])
