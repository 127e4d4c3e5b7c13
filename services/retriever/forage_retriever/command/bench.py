"""`forage index bench`: queries per second, latencies and memory of an index, by mode and batch size."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.table import Table

from forage_common.settings import RetrieverSettings
from forage_retriever.command.measure import list_modes, measure_throughput, open_index
from forage_retriever.command.questions import read_questions
from forage_retriever.corpus.read import split_contents
from forage_retriever.index import load

BATCHES = (1, 16, 64)
TOPK = 3
_QUESTIONS = 1024
_QUESTION_WORDS = 12
_MIB = 2**20


def benchmark_index(
    folder: Path, settings: RetrieverSettings, seconds: float = 2.0, questions: Path | None = None
) -> None:
    """Search with the questions of a file, or else with the first words of passages; print a table and a JSON line.

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
    table = Table(title=f"{folder}: {len(index.corpus)} passages, {settings.threads} threads, top {TOPK}")
    for title in ("mode", "batch", "queries/s", "CPU ms/query", "p50 ms", "p99 ms"):
        table.add_column(title, justify="left" if title == "mode" else "right")
    for row in rows:
        cells = (f"{row[key]:,.1f}" for key in ("qps", "cpu_ms", "p50_ms", "p99_ms"))
        table.add_row(row["mode"], str(row["batch"]), *cells)
    console = Console()
    console.print(table)
    console.print(
        f"ready in {ready_s:.1f} s; memory {memory.rss / _MIB:,.0f} MiB,"
        f" of which {shared / _MIB:,.0f} MiB are mapped files"
    )
    typer.echo(json.dumps({"ready_s": round(ready_s, 2), "rss": memory.rss, "rss_mapped": shared, "rows": rows}))


def _list_openings(index: load.Index) -> list[str]:
    """The first words of passages, evenly spaced."""
    rows = np.linspace(0, len(index.corpus), min(_QUESTIONS, len(index.corpus)), endpoint=False).astype(int)
    texts = (split_contents(index.corpus.contents[int(row)]) for row in rows)
    return [" ".join((text or title).split()[:_QUESTION_WORDS]) for title, text in texts]
