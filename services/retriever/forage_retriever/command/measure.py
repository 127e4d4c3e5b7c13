"""What `forage index eval` and `forage index bench` share: an index with all its modes, and timed searches."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from forage_common.settings import RetrievalMode, RetrieverSettings
from forage_common.telemetry.logs import get_logger
from forage_retriever.index import load, manifest


def open_index(folder: Path, settings: RetrieverSettings) -> load.Index:
    """The index of a folder, with all its modes.

    Raises:
        UserError: the folder or the settings are at fault.
    """
    available = manifest.read_manifest(folder).modes
    mode = next(mode for mode in (RetrievalMode.HYBRID, RetrievalMode.DENSE, RetrievalMode.BM25) if mode in available)
    log = get_logger()
    return load.load_index(
        Path(), settings.model_copy(update={"index": folder, "mode": mode}), lambda what: log.info("waiting", why=what)
    )


def list_modes(index: load.Index) -> list[str]:
    """The modes that an index can be searched in."""
    return [str(mode) for mode in RetrievalMode if mode in index.searchers]


def measure_throughput(search: Callable[[Any], object], items: Any, batch: int, seconds: float) -> dict[str, float]:
    """Queries per second, CPU milliseconds per query (of the whole process), p50 and p99 of a call in milliseconds.

    Batches are slices of the items (a sequence or an array), in turn, in one thread, after one warm-up batch.
    """
    batch = min(batch, len(items))
    search(items[:batch])
    calls: list[float] = []
    cpu, position = time.process_time(), 0
    while sum(calls) < seconds:
        if position + batch > len(items):
            position = 0
        began = time.perf_counter()
        search(items[position : position + batch])
        calls.append(time.perf_counter() - began)
        position += batch
    searched = batch * len(calls)
    p50, p99 = (float(np.percentile(calls, share)) for share in (50, 99))
    return {
        "qps": round(searched / sum(calls), 2),
        "cpu_ms": round(1000 * (time.process_time() - cpu) / searched, 4),
        "p50_ms": round(1000 * p50, 3),
        "p99_ms": round(1000 * p99, 3),
    }
