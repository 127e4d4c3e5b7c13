"""`forage index eval`: retrieval quality of an index by mode, and its speed against recall over search settings."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.table import Table

from forage_retriever.command.bench import list_modes, measure_throughput, open_index
from forage_retriever.command.questions import GoldQuestion, read_questions
from forage_retriever.index import load
from forage_runtime.errors import DataError, SettingsError
from forage_runtime.settings import RetrievalMode, RetrieverSettings
from forage_runtime.text.console import TextConsole

DEPTHS = (1, 3, 10)
BATCH = 32
SECONDS = 1.0
"""For which each point of a sweep is timed."""

TIMED_TOPK = 3
SWEPT_QUESTIONS = 512
EF_SEARCH = (16, 32, 64, 128, 256, 512)
NPROBE = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REFINE = (1, 5, 10, 20, 50)
ALL = "all"


def evaluate_index(
    folder: Path,
    questions_file: Path,
    settings: RetrieverSettings,
    out: Path | None = None,
    sweep: bool = False,
    as_json: bool = False,
) -> None:
    """Measure an index: print tables, or one line of JSON. `out` gets `eval.json` and, with a sweep, `sweep.svg`.

    Raises:
        UserError: the index, the questions or the settings are at fault.
    """
    questions = read_questions(questions_file)
    index = open_index(folder, settings)
    quality = {mode: _measure_quality(index, mode, questions) for mode in list_modes(index)}
    if not any(rows[ALL]["hit@10"] for rows in quality.values()):
        raise DataError(
            f"questions {questions_file}: no gold passage was found at all: are gold_ids ids of this index's corpus?"
        )
    report: dict[str, Any] = {"quality": quality}
    if sweep:
        report["sweep"] = measure_efforts(index, questions)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        title = f"{folder}: {len(index.corpus)} passages, {len(questions)} questions"
        tables = [_build_quality_table(quality, title), *([_build_sweep_table(report["sweep"])] if sweep else [])]
        TextConsole().print(*tables, sep="\n")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "eval.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        if sweep:
            _plot_sweep(out / "sweep.svg", report["sweep"])


def compute_metrics(questions: Sequence[GoldQuestion], ranked_ids: Sequence[Sequence[str]]) -> dict[str, float | None]:
    """Means over questions of metrics of their ranked passage ids.

    recall@k: share of the gold passages among the first k. hit@k: whether at least one is. all@k: whether all are, over
    questions with several gold passages (null without such). mrr: 1 / rank of the first one, 0 where none was found.
    """
    metrics: dict[str, float | None] = {"questions": len(questions)}
    pairs = [(question.gold_ids, ids) for question, ids in zip(questions, ranked_ids, strict=True)]
    several = [(gold, ids) for gold, ids in pairs if len(gold) > 1]
    for k in DEPTHS:
        shares = [len(gold & set(ids[:k])) / len(gold) for gold, ids in pairs]
        metrics[f"recall@{k}"] = float(np.mean(shares))
        metrics[f"hit@{k}"] = float(np.mean([share > 0 for share in shares]))
        metrics[f"all@{k}"] = float(np.mean([gold <= set(ids[:k]) for gold, ids in several])) if several else None
    ranks = [next((rank for rank, id in enumerate(ids, 1) if id in gold), 0) for gold, ids in pairs]
    metrics["mrr"] = float(np.mean([1 / rank if rank else 0.0 for rank in ranks]))
    return metrics


def compute_overlap(rows: NDArray[np.int64], exact: NDArray[np.int64]) -> float:
    """Share of the exact rows [n, k] that are among the found rows [n, k]."""
    shared = [len(set(own) & set(best)) for own, best in zip(rows.tolist(), exact.tolist(), strict=True)]
    return sum(shared) / int(exact.size)


def _measure_quality(
    index: load.Index, mode: str, questions: Sequence[GoldQuestion]
) -> dict[str, dict[str, float | None]]:
    """Metrics by source of the questions, and over all of them."""
    ranked_ids: list[list[str]] = []
    for begin in range(0, len(questions), BATCH):
        texts = [question.text for question in questions[begin : begin + BATCH]]
        for hits in index.searchers[mode].search(texts, max(DEPTHS)):
            ranked_ids.append([index.corpus.ids[hit.row] for hit in hits])
    numbers: dict[str, list[int]] = defaultdict(list)
    for number, question in enumerate(questions):
        numbers[ALL].append(number)
        if question.source:
            numbers[question.source].append(number)
    return {
        source: compute_metrics([questions[number] for number in own], [ranked_ids[number] for number in own])
        for source, own in numbers.items()
    }


def measure_efforts(
    index: load.Index,
    questions: Sequence[GoldQuestion],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Overlap with exact search and queries per second of the vector search alone, over its settings.

    `progress` gets the number of points that are done, and of all.

    Raises:
        SettingsError: the index has no vectors, or exact search is not possible.
    """
    from forage_retriever.search.dense import DenseIndex
    from forage_retriever.search.vector_index import Effort

    dense = index.searchers.get(RetrievalMode.DENSE)
    if not isinstance(dense, DenseIndex):
        raise SettingsError(
            "a sweep measures vector search: give an index with vectors, and leave retriever.rerank empty"
        )
    vectors = dense.vectors
    queries = dense.encoder.encode_queries([question.text for question in questions[:SWEPT_QUESTIONS]])
    exact = vectors.search_exact(queries, max(DEPTHS))
    if exact is None:
        raise SettingsError("a sweep compares with exact search: build the index with its vectors stored")
    efforts = itertools.product(
        EF_SEARCH if vectors.has_graph else (1,),
        [cells for cells in NPROBE if cells <= vectors.cells] or [1],
        REFINE if vectors.stores_vectors else (1,),
    )
    points: list[dict[str, Any]] = []
    for effort in (all_efforts := [Effort(*one) for one in efforts]):
        nearest = vectors.search(queries, max(DEPTHS), effort=effort)[1]
        search = partial(vectors.search, topk=TIMED_TOPK, effort=effort)
        points.append(
            {
                "ef_search": effort.ef_search if vectors.has_graph else None,
                "nprobe": effort.nprobe if vectors.cells else None,
                "refine": effort.refine if vectors.stores_vectors else None,
                "top10": round(compute_overlap(nearest, exact), 4),
                "qps": measure_throughput(search, queries, BATCH, SECONDS)["qps"],
            }
        )
        progress(len(points), len(all_efforts))
    return points


def _build_quality_table(quality: Mapping[str, Mapping[str, Mapping[str, float | None]]], title: str) -> Table:
    names = [f"{metric}@{k}" for metric in ("recall", "hit", "all") for k in DEPTHS] + ["mrr"]
    table = Table(title=title)
    table.add_column("mode")
    table.add_column("source")
    for name in ("n", *names):
        table.add_column(name, justify="right")
    for mode, rows in quality.items():
        for source, row in rows.items():
            cells = ("–" if (value := row[name]) is None else f"{value:.3f}" for name in names)
            table.add_row(mode if source == ALL else "", source, str(row["questions"]), *cells)
        table.add_section()
    return table


def _build_sweep_table(points: Sequence[Mapping[str, Any]]) -> Table:
    names = _list_varied(points)
    table = Table(title=f"vector search alone, batches of {BATCH}: share of the exact top 10, and queries per second")
    for title in (*names, "top-10", "queries/s"):
        table.add_column(title, justify="right")
    for point in points:
        table.add_row(*(str(point[name]) for name in names), f"{point['top10']:.4f}", f"{point['qps']:,.0f}")
    return table


def _plot_sweep(file: Path, points: Sequence[Mapping[str, Any]]) -> None:
    """Save an SVG of recall against queries per second: a line for each refinement, or one, along another setting."""
    # Imported here: only a sweep with --out pays for it.
    import matplotlib
    from matplotlib.figure import Figure

    along = next((name for name in _list_varied(points) if name != "refine"), "refine")
    lines: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for point in points:
        lines[f"refine {point['refine']}" if point["refine"] is not None and along != "refine" else along].append(point)
    axes = (figure := Figure(figsize=(8, 5), layout="constrained")).subplots()
    for name, line in lines.items():
        axes.plot([point["qps"] for point in line], [point["top10"] for point in line], marker="o", label=name)
        for point in line:
            place = point["qps"], point["top10"]
            axes.annotate(point[along], place, xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.set(xscale="log", xlabel="queries per second", ylabel=f"share of the exact top 10, by {along}")
    axes.grid(color="#dddddd")
    axes.legend()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(file, format="svg")


def _list_varied(points: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name for name in ("ef_search", "nprobe", "refine") if points[0][name] is not None]
