"""`forage index bench`: queries per second, latencies and memory of an index, by mode and batch size."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import typer
from rich.table import Table

from forage_retriever.command.questions import read_questions
from forage_retriever.corpus.read import split_contents
from forage_retriever.devices import count_threads
from forage_retriever.index import load, manifest
from forage_runtime.settings import RetrievalMode, RetrieverSettings
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.text.console import TextConsole

BATCHES = (1, 16, 64)
TOPK = 3
_QUESTIONS = 1024
_QUESTION_WORDS = 12
_MIB = 2**20


def benchmark_index(
    folder: Path,
    settings: RetrieverSettings,
    seconds: float = 2.0,
    questions: Path | None = None,
    as_json: bool = False,
) -> None:
    """Search with the questions of a file, or else with the first words of passages; print a table, or a line of JSON.

    Raises:
        UserError: the index, the questions or the settings are at fault.
    """
    began = time.monotonic()
    index = open_index(folder, settings)
    ready_s = time.monotonic() - began
    texts = [question.text for question in read_questions(questions)] if questions else _list_openings(index)
    rows: list[dict[str, Any]] = []
    for mode in list_modes(index):
        searcher = index.searchers[mode]
        for batch in BATCHES:
            speed = measure_throughput(partial(searcher.search, topk=TOPK), texts, batch, seconds)
            rows.append({"mode": mode, "batch": batch, **speed})
    memory = psutil.Process().memory_info()
    shared = getattr(memory, "shared", 0)
    if as_json:
        typer.echo(json.dumps({"ready_s": round(ready_s, 2), "rss": memory.rss, "rss_mapped": shared, "rows": rows}))
        return
    table = Table(title=f"{folder}: {len(index.corpus)} passages, {count_threads(settings)} threads, top {TOPK}")
    for title in ("mode", "batch", "queries/s", "CPU ms/query", "p50 ms", "p99 ms"):
        table.add_column(title, justify="left" if title == "mode" else "right")
    for row in rows:
        cells = (f"{row[key]:,.1f}" for key in ("qps", "cpu_ms", "p50_ms", "p99_ms"))
        table.add_row(row["mode"], str(row["batch"]), *cells)
    console = TextConsole()
    console.print(table)
    console.print(
        f"ready in {ready_s:.1f} s; memory {memory.rss / _MIB:,.0f} MiB,"
        f" of which {shared / _MIB:,.0f} MiB are mapped files"
    )


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


def _list_openings(index: load.Index) -> list[str]:
    """The first words of passages, evenly spaced."""
    rows = np.linspace(0, len(index.corpus), min(_QUESTIONS, len(index.corpus)), endpoint=False).astype(int)
    texts = (split_contents(index.corpus.contents[int(row)]) for row in rows)
    return [" ".join((text or title).split()[:_QUESTION_WORDS]) for title, text in texts]
