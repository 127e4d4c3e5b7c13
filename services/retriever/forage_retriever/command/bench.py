"""`forage index bench`: queries a second, latencies and memory of an index, by mode and batch."""

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
from rich.console import Console
from rich.table import Table

from forage_common.settings import RetrieverSettings
from forage_retriever.command import evaluate
from forage_retriever.corpus.read import title_and_text
from forage_retriever.index import load

BATCHES = (1, 16, 64)
TOPK = 3
_QUESTIONS = 1024
_QUESTION_WORDS = 12
_MIB = 2**20


def run(index: Path, settings: RetrieverSettings, seconds: float = 2.0, questions: Path | None = None) -> None:
    """Search with the questions of a file, or else with the first words of passages; a table, then one line of JSON.

    Raises:
        UserError: the index, the questions or the settings are at fault.
    """
    begin = time.monotonic()
    made = evaluate.opened(index, settings)
    ready_s = time.monotonic() - begin
    texts = [question.text for question in evaluate.read(questions)] if questions else _openings(made)
    rows: list[dict[str, Any]] = []
    for mode in evaluate.modes(made):
        searcher = made.searchers[mode]
        for batch in BATCHES:
            seen = timed(partial(searcher.search, topk=TOPK), texts, batch, seconds)
            rows.append({"mode": mode, "batch": batch, **seen})
    memory = psutil.Process().memory_info()
    shared = getattr(memory, "shared", 0)
    table = Table(title=f"{index}: {len(made.corpus)} passages, {settings.threads} threads, top {TOPK}")
    for title in ("mode", "batch", "queries/s", "CPU ms/query", "p50 ms", "p99 ms"):
        table.add_column(title, justify="left" if title == "mode" else "right")
    for row in rows:
        figures = (f"{row[key]:,.1f}" for key in ("qps", "cpu_ms", "p50_ms", "p99_ms"))
        table.add_row(row["mode"], str(row["batch"]), *figures)
    console = Console()
    console.print(table)
    console.print(
        f"ready in {ready_s:.1f} s; memory {memory.rss / _MIB:,.0f} MiB,"
        f" of which {shared / _MIB:,.0f} are files that are mapped"
    )
    typer.echo(json.dumps({"ready_s": round(ready_s, 2), "rss": memory.rss, "rss_mapped": shared, "rows": rows}))


def timed(search: Callable[[Any], object], items: Any, batch: int, seconds: float) -> dict[str, float]:
    """Queries a second, CPU milliseconds a query (of the whole process), p50 and p99 of a call in milliseconds.

    Batches are slices of the items (a sequence or an array), in turn, in one thread, after one that does not count.
    """
    batch = min(batch, len(items))
    search(items[:batch])
    calls: list[float] = []
    cpu, place = time.process_time(), 0
    while sum(calls) < seconds:
        if place + batch > len(items):
            place = 0
        begin = time.perf_counter()
        search(items[place : place + batch])
        calls.append(time.perf_counter() - begin)
        place += batch
    asked = batch * len(calls)
    p50, p99 = (float(np.percentile(calls, share)) for share in (50, 99))
    return {
        "qps": round(asked / sum(calls), 2),
        "cpu_ms": round(1000 * (time.process_time() - cpu) / asked, 4),
        "p50_ms": round(1000 * p50, 3),
        "p99_ms": round(1000 * p99, 3),
    }


def _openings(made: load.Index) -> list[str]:
    """The first words of passages, evenly spaced."""
    rows = np.linspace(0, len(made.corpus), min(_QUESTIONS, len(made.corpus)), endpoint=False).astype(int)
    texts = (title_and_text(made.corpus.contents[int(row)]) for row in rows)
    return [" ".join((text or title).split()[:_QUESTION_WORDS]) for title, text in texts]
