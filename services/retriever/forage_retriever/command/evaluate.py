"""`forage index eval`: what an index finds of what it should, and what thoroughness costs.

Questions are JSON lines (`.jsonl`, `.jsonl.gz`) with `question`, `gold_ids` (the passages that answer it together) and,
if there are several sorts, `source`.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from forage_common.errors import DataError, SettingsError
from forage_common.settings import RetrievalMode, RetrieverSettings
from forage_common.telemetry.logs import get_logger
from forage_retriever.command import chart
from forage_retriever.index import load, manifest

DEPTHS = (1, 3, 10)
BATCH = 32
SECONDS = 1.0
"""How long each point of a sweep is timed."""

TIMED_TOPK = 3
SWEPT_QUESTIONS = 512
EF_SEARCH = (16, 32, 64, 128, 256, 512)
NPROBE = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REFINE = (1, 5, 10, 20, 50)
ALL = "all"


@dataclass(frozen=True)
class Question:
    """A question, the ids of the passages that answer it together, and where it is from."""

    text: str
    gold_ids: frozenset[str]
    source: str


def read(file: Path) -> list[Question]:
    """The questions of a file.

    Raises:
        DataError: it cannot be read, or a line is no question; names the line and the field.
    """
    found = []
    try:
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    found.append(_question(line, f"{file}:{number}"))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"questions {file} cannot be read ({error}): give a JSONL file") from None
    if not found:
        raise DataError(f"questions {file} has no lines: write one JSON object with question and gold_ids a line")
    return found


def figures(questions: Sequence[Question], found: Sequence[Sequence[str]]) -> dict[str, float | None]:
    """Means over questions of the ids found for each, best first.

    recall@k: share of the gold passages that are among the first k. hit@k: whether one is. all@k: whether all are, over
    questions that have several (null without such). mrr: 1 / place of the first one, 0 where none was found.
    """
    out: dict[str, float | None] = {"questions": len(questions)}
    several = [(question, ids) for question, ids in zip(questions, found, strict=True) if len(question.gold_ids) > 1]
    for k in DEPTHS:
        shares = [
            len(question.gold_ids & set(ids[:k])) / len(question.gold_ids)
            for question, ids in zip(questions, found, strict=True)
        ]
        out[f"recall@{k}"] = float(np.mean(shares))
        out[f"hit@{k}"] = float(np.mean([share > 0 for share in shares]))
        out[f"all@{k}"] = (
            float(np.mean([question.gold_ids <= set(ids[:k]) for question, ids in several])) if several else None
        )
    places = [
        next((place for place, id in enumerate(ids, 1) if id in question.gold_ids), 0)
        for question, ids in zip(questions, found, strict=True)
    ]
    out["mrr"] = float(np.mean([1 / place if place else 0.0 for place in places]))
    return out


def overlap(found: NDArray[np.int64], exact: NDArray[np.int64]) -> float:
    """Share of the exact rows [n, k] that were found [n, k]."""
    shared = [len(set(own) & set(best)) for own, best in zip(found.tolist(), exact.tolist(), strict=True)]
    return sum(shared) / int(exact.size)


def opened(index: Path, settings: RetrieverSettings) -> load.Index:
    """An index folder with all its modes.

    Raises:
        UserError: the folder or the settings are at fault.
    """
    held = manifest.read(index).modes
    mode = next(mode for mode in (RetrievalMode.HYBRID, RetrievalMode.DENSE, RetrievalMode.BM25) if mode in held)
    log = get_logger()
    return load.load(
        Path(), settings.model_copy(update={"index": index, "mode": mode}), lambda what: log.info("waiting", why=what)
    )


def modes(made: load.Index) -> list[str]:
    """The modes that an index can be searched in."""
    return [str(mode) for mode in RetrievalMode if mode in made.searchers]


def run(
    index: Path, questions: Path, settings: RetrieverSettings, out: Path | None = None, sweep: bool = False
) -> None:
    """Measure an index: tables, then one line of JSON. A folder `out` gets `eval.json` and, with a sweep, `sweep.svg`.

    Raises:
        UserError: the index, the questions or the settings are at fault.
    """
    asked = read(questions)
    made = opened(index, settings)
    console = Console()
    quality = {mode: _by_source(made, mode, asked) for mode in modes(made)}
    if not any(rows[ALL]["hit@10"] for rows in quality.values()):
        raise DataError(
            f"questions {questions}: no gold passage was found at all: are gold_ids ids of this index's corpus?"
        )
    console.print(_quality_table(quality, f"{index}: {len(made.corpus)} passages, {len(asked)} questions"))
    report: dict[str, Any] = {"quality": quality}
    if sweep:
        points = _swept(made, asked)
        report["sweep"] = points
        console.print(_sweep_table(points))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "eval.json").write_text(json.dumps(report, indent=2) + "\n")
        if sweep:
            (out / "sweep.svg").write_text(_plot(report["sweep"]))
    typer.echo(json.dumps(report))


def _question(line: str, where: str) -> Question:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}): write one JSON object a line") from None
    text, gold = (row.get("question"), row.get("gold_ids")) if isinstance(row, dict) else (None, None)
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: field 'question' is {text!r}: give the question's text")
    if not isinstance(gold, list) or not gold or not all(isinstance(id, str | int) for id in gold):
        raise DataError(f"{where}: field 'gold_ids' is {gold!r}: give a list of passage ids")
    return Question(text, frozenset(str(id) for id in gold), str(row.get("source") or ""))


def _by_source(made: load.Index, mode: str, questions: Sequence[Question]) -> dict[str, dict[str, float | None]]:
    found: list[list[str]] = []
    for begin in range(0, len(questions), BATCH):
        texts = [question.text for question in questions[begin : begin + BATCH]]
        for hits in made.searchers[mode].search(texts, max(DEPTHS)):
            found.append([made.corpus.ids[hit.row] for hit in hits])
    places: dict[str, list[int]] = defaultdict(list)
    for place, question in enumerate(questions):
        places[ALL].append(place)
        if question.source:
            places[question.source].append(place)
    return {
        source: figures([questions[place] for place in own], [found[place] for place in own])
        for source, own in places.items()
    }


def _swept(made: load.Index, questions: Sequence[Question]) -> list[dict[str, Any]]:
    """Overlap with exact search, and queries a second of the vector search alone, over its knobs."""
    from forage_retriever.command.bench import timed
    from forage_retriever.search.dense import DenseIndex
    from forage_retriever.search.vector_index import Effort

    dense = made.searchers.get(RetrievalMode.DENSE)
    if not isinstance(dense, DenseIndex):
        raise SettingsError(
            "a sweep measures vector search: give an index with vectors, and leave retriever.rerank empty"
        )
    vectors = dense.vectors
    queries = dense.encoder.queries([question.text for question in questions[:SWEPT_QUESTIONS]])
    exact = vectors.exact(queries, max(DEPTHS))
    if exact is None:
        raise SettingsError("a sweep compares with exact search: build the index with its vectors stored")
    points = []
    for ef_search in EF_SEARCH if vectors.has_graph else (1,):
        for nprobe in [cells for cells in NPROBE if cells <= vectors.cells] or [1]:
            for refine in REFINE if vectors.stores_vectors else (1,):
                effort = Effort(ef_search, nprobe, refine)
                found = vectors.search(queries, max(DEPTHS), effort=effort)[1]
                seen = timed(partial(vectors.search, topk=TIMED_TOPK, effort=effort), queries, BATCH, SECONDS)
                points.append(
                    {
                        "ef_search": ef_search if vectors.has_graph else None,
                        "nprobe": nprobe if vectors.cells else None,
                        "refine": refine if vectors.stores_vectors else None,
                        "top10": round(overlap(found, exact), 4),
                        "qps": seen["qps"],
                    }
                )
    return points


def _quality_table(quality: Mapping[str, Mapping[str, Mapping[str, float | None]]], title: str) -> Table:
    names = [f"{figure}@{k}" for figure in ("recall", "hit", "all") for k in DEPTHS] + ["mrr"]
    table = Table(title=title)
    table.add_column("mode")
    table.add_column("source")
    for name in ("n", *names):
        table.add_column(name, justify="right")
    for mode, rows in quality.items():
        for source, row in rows.items():
            shown = (row[name] for name in names)
            cells = ("–" if value is None else f"{value:.3f}" for value in shown)
            table.add_row(mode if source == ALL else "", source, str(row["questions"]), *cells)
        table.add_section()
    return table


def _sweep_table(points: Sequence[Mapping[str, Any]]) -> Table:
    knobs = _knobs(points)
    table = Table(title=f"vector search alone, batches of {BATCH}: share of the exact top 10, and queries a second")
    for title in (*knobs, "top-10", "queries/s"):
        table.add_column(title, justify="right")
    for point in points:
        table.add_row(*(str(point[knob]) for knob in knobs), f"{point['top10']:.4f}", f"{point['qps']:,.0f}")
    return table


def _plot(points: Sequence[Mapping[str, Any]]) -> str:
    """A line for each refinement (or one), along the other knob."""
    lines: dict[str, list[chart.Point]] = defaultdict(list)
    along = next((knob for knob in _knobs(points) if knob != "refine"), "refine")
    for point in points:
        name = f"refine {point['refine']}" if point["refine"] is not None and along != "refine" else along
        lines[name].append(chart.Point(point["qps"], point["top10"], str(point[along])))
    return chart.lines(lines, "queries a second", f"share of the exact top 10, by {along}")


def _knobs(points: Sequence[Mapping[str, Any]]) -> list[str]:
    return [knob for knob in ("ef_search", "nprobe", "refine") if points[0][knob] is not None]
