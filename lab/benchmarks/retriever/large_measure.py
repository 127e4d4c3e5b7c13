"""One index measured in a process of its own: `large_measure.py` reads its task, JSON, from standard input.

Memory, start and speed are of the process that searches, through the retriever's own `VectorIndex`. CPU seconds are the
process's, all threads counted.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forage_retriever.command.bench import measure_throughput
from forage_retriever.command.evaluate import compute_overlap
from forage_retriever.search.vector_index import Effort, VectorIndex
from forage_runtime.settings import RetrieverSettings

Vectors = NDArray[np.float32]
BATCH = 64
TOPK = 3
LOAD = 0.7
_WAITS = 200
_GIB = 2**30


@dataclass(frozen=True)
class Task:
    """What to measure.

    Attributes:
        folder: of the index.
        queries, exact: files of the questions [n, dimension] and of the rows [n, 10] nearest to them.
        efforts: efSearch or nprobe values.
        threads: of the last measurement; the others use one.
        seconds: of each measurement.
        is_full: whether latency under load, several threads and memory are wanted as well.
    """

    folder: str
    queries: str
    exact: str
    efforts: list[int]
    threads: int
    seconds: float
    is_full: bool


def measure(task: Task) -> dict[str, Any]:
    """Measure an index. Returns its start, memory, and a row per effort."""
    queries, exact = np.load(task.queries), np.load(task.exact)
    folder = Path(task.folder)
    began = time.monotonic()
    index = VectorIndex(folder, RetrieverSettings(threads=1))
    opened_s = time.monotonic() - began
    index.search(queries[:1], TOPK)
    result: dict[str, Any] = {"open_s": opened_s, "start_s": time.monotonic() - began, "rows": []}
    for effort in task.efforts:
        result["rows"].append(_measure_effort(index, queries, exact, task, effort))
    result |= {"held_gib": _read_memory("RssAnon"), "mapped_gib": _read_memory("RssFile")}
    if task.is_full:
        several = VectorIndex(folder, RetrieverSettings(threads=task.threads))
        for row in result["rows"]:
            search = _bind(several, row["effort"])
            speed = measure_throughput(search, queries, BATCH, task.seconds)
            row |= {"all_threads_s": speed["cpu_ms"] / 1000, "all_threads_qps": speed["qps"]}
    return result


def _measure_effort(
    index: VectorIndex, queries: Vectors, exact: NDArray[Any], task: Task, effort: int
) -> dict[str, Any]:
    search = _bind(index, effort)
    nearest = np.concatenate(
        [
            index.search(queries[begin : begin + BATCH], exact.shape[1], effort=Effort(effort, effort, 0))[1]
            for begin in range(0, len(queries), BATCH)
        ]
    )
    single = measure_throughput(search, queries, 1, task.seconds)
    batch = measure_throughput(search, queries, BATCH, task.seconds)
    row = {
        "effort": effort,
        "recall_3": compute_overlap(nearest[:, :3], exact[:, :3]),
        "recall_10": compute_overlap(nearest, exact),
        "single_s": single["cpu_ms"] / 1000,
        "batch_s": batch["cpu_ms"] / 1000,
        "single_p99_ms": single["p99_ms"],
    }
    if task.is_full:
        row["p99_ms"] = measure_loaded_p99(search, queries, LOAD * single["qps"], 4 * task.seconds)
    return row


def _bind(index: VectorIndex, effort: int) -> Callable[[Vectors], object]:
    return lambda vectors: index.search(vectors, TOPK, effort=Effort(effort, effort, 0))


def measure_loaded_p99(search: Callable[[Vectors], object], queries: Vectors, rate: float, seconds: float) -> float:
    """99th percentile in milliseconds from arrival to result of queries that arrive singly, at random.

    `rate` per second is the mean. One thread searches and takes all that wait, at most 64, as the retriever does.
    """
    chance = np.random.default_rng(0)
    arrivals = np.cumsum(chance.exponential(1 / rate, max(int(rate * seconds), _WAITS)))
    waited: list[float] = []
    began, done = time.perf_counter(), 0
    while done < len(arrivals) and (arrivals[done] <= seconds or done < 2):
        now = time.perf_counter() - began
        if now < arrivals[done]:
            time.sleep(arrivals[done] - now)
            continue
        taken = min(int(np.searchsorted(arrivals, now, "right")) - done, BATCH)
        search(queries[(done + np.arange(taken)) % len(queries)])
        waited += list(time.perf_counter() - began - arrivals[done : done + taken])
        done += taken
    return 1000 * float(np.percentile(waited, 99))


def _read_memory(field: str) -> float:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(status.partition(f"{field}:")[2].split()[0]) / _GIB


if __name__ == "__main__":
    json.dump(measure(Task(**json.load(sys.stdin))), sys.stdout)
