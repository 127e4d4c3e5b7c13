"""Builds the indexes that are compared, each in a process of its own, which reads its task, JSON, from its input.

An HNSW graph grows from size to size, so that the largest costs what all of them cost; the others are built anew, since
the number of their cells depends on their size. What an index is made of are the retriever's own functions of building.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from large_vectors import DIMENSION

from forage_retriever.search import faiss_build
from forage_retriever.search.vectors import VECTORS_FILE, iterate_blocks, map_vectors, sample_vectors, save_vectors

CELLS = 4.096
"""Times the root of the number of vectors: 4,096 for a million, 18,777 for wiki-18."""

EF_CONSTRUCTION = 40
"""FAISS's default."""


@dataclass(frozen=True)
class Kind:
    """An index type whose cells depend on the number of vectors.

    Attributes:
        name: of the type, as in tables.
        efforts: efSearch or nprobe values to measure; [1] where there is neither.
        default: the one that the summary shows.
        is_graph: whether it is an HNSW graph.
    """

    name: str
    efforts: tuple[int, ...]
    default: int
    is_graph: bool = False

    @property
    def has_cells(self) -> bool:
        """Whether it is an inverted file."""
        return self.name.startswith("IVF,")

    def write_factory(self, passages: int) -> str:
        """FAISS's factory string for so many vectors."""
        return self.name.replace("IVF,", f"IVF{count_cells(passages)},")


KINDS = (
    Kind("Flat", (1,), 1),
    Kind("SQ8", (1,), 1),
    Kind("IVF,SQ8", (32, 64, 128), 64),
    Kind("IVF,PQ192x4fs", (32, 64, 128), 64),
    Kind("IVF,RaBitQ", (32, 64, 128), 64),
    Kind("HNSW32_SQ8", (128, 256, 512), 256, is_graph=True),
    Kind("HNSW32", (128, 256, 512), 256, is_graph=True),
)


def count_cells(passages: int) -> int:
    """Cells of an IVF index over so many vectors, in the ratio of the square root."""
    return max(round(CELLS * math.sqrt(passages)), 1)


def build(folder: Path, kind: Kind, passages: int, vectors_file: Path, grow: Path | None) -> dict[str, Any]:
    """Build the index of the first `passages` vectors. `grow` is the folder of a smaller graph to add to.

    Returns its factory string, its wall-clock and CPU seconds by stage (training, adding, writing, stored vectors), its
    peak memory, and the size of its files.
    """
    vectors = map_vectors(vectors_file)[:passages]
    factory = kind.write_factory(passages)
    folder.mkdir(parents=True, exist_ok=True)
    clock = _Clock()
    index, begin = _open(factory, grow)
    if wanted := faiss_build.count_training_rows(index, passages):
        inner = faiss_build.unwrap_index(index)
        cells = folder.parent / f"cells-{passages}.npy" if kind.has_cells else None
        sample = sample_vectors(vectors, wanted)
        if cells is not None and cells.exists():  # of another type: as many, trained on the same sample
            inner.quantizer.add(np.load(cells))
        elif cells is not None:
            inner.train_q1(wanted, faiss.swig_ptr(sample), True, inner.metric_type)
            np.save(cells, inner.quantizer.reconstruct_n(0, inner.nlist))
        clock.end("cells")
        faiss_build.train_index(index, factory, sample)
    clock.end("train")
    for block in iterate_blocks(vectors[begin:]):
        faiss_build.add_vectors(index, factory, block)
        _report(index.ntotal, passages)
    clock.end("add")
    faiss_build.write_index(index, folder / "index.tmp")
    clock.end("write")
    if faiss_build.needs_stored_vectors(factory, DIMENSION):
        save_vectors(vectors, folder / VECTORS_FILE, "<f2")
        clock.end("store")
    (folder / "index.tmp").rename(folder / faiss_build.INDEX_FILE)
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    peak = 1024 * int(Path("/proc/self/status").read_text(encoding="utf-8").partition("VmHWM:")[2].split()[0])
    return {"factory": factory, "begin": begin, "stages": clock.stages, "peak": peak, "sizes": sizes}


class _Clock:
    def __init__(self) -> None:
        self.stages: dict[str, dict[str, float]] = {}
        self._began, self._cpu = time.monotonic(), time.process_time()

    def end(self, stage: str) -> None:
        now, cpu = time.monotonic(), time.process_time()
        self.stages[stage] = {"s": now - self._began, "cpu_s": cpu - self._cpu}
        self._began, self._cpu = now, cpu


def _open(factory: str, grow: Path | None) -> tuple[Any, int]:
    """The index to add to, and the number of its vectors."""
    if grow is None:
        index = faiss_build.create_index(factory, DIMENSION)
    else:  # in memory: a mapped graph takes no vectors
        index = faiss.read_index(str(grow / faiss_build.INDEX_FILE))
    if isinstance(index, faiss.IndexHNSW):
        index.hnsw.efConstruction = EF_CONSTRUCTION
    return index, int(index.ntotal)


def _report(done: int, passages: int) -> None:
    print(json.dumps({"done": done, "of": passages}), flush=True)


def main() -> None:
    task = json.load(sys.stdin)
    faiss.omp_set_num_threads(os.cpu_count() or 1)
    kind = next(kind for kind in KINDS if kind.name == task["kind"])
    grow = Path(task["grow"]) if task["grow"] else None
    built = build(Path(task["folder"]), kind, task["passages"], Path(task["vectors"]), grow)
    print(json.dumps({"built": built}), flush=True)


if __name__ == "__main__":
    main()
