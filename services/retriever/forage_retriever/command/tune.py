"""`forage index tune`: settings of hybrid search and of the vector search that suit an index and a user's questions.

Half of the questions choose, the others judge; a gain within the noise of the held-out half is not recommended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer
import yaml
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from forage_retriever.command.bench import open_index
from forage_retriever.command.evaluate import compute_metrics, compute_overlap, measure_efforts
from forage_retriever.command.fusion import (
    PARTS,
    TOPK,
    Fusion,
    Judged,
    bootstrap,
    judge,
    list_fusions,
    score_fusion,
    split_questions,
)
from forage_retriever.command.questions import GoldQuestion, read_questions
from forage_retriever.index import load
from forage_retriever.search.dense import DenseIndex
from forage_runtime.errors import DataError, SettingsError
from forage_runtime.settings import RetrievalMode, RetrieverSettings
from forage_runtime.text.console import TextConsole

MIN_QUESTIONS = 20
LEAST_RECALL = 0.95
"""Share of the exact ten nearest that the vector search must find, or more where it does now."""
_SHOWN = ("hit@1", "hit@3", "hit@10", "recall@10", "mrr")
Report = dict[str, Any]


def tune_index(
    folder: Path,
    questions_file: Path,
    settings: RetrieverSettings,
    recall: float | None = None,
    out: Path | None = None,
    as_json: bool = False,
) -> None:
    """Sweep settings, and print tables and the settings to paste; `out` gets the settings.

    Args:
        recall: share of the exact ten nearest that the vector search must find; None: as it finds now, at least
            `LEAST_RECALL`.
        as_json: print one line of JSON instead.

    Raises:
        UserError: the index, the questions or the settings are at fault.
    """
    questions = read_questions(questions_file)
    if len(questions) < MIN_QUESTIONS:
        raise DataError(
            f"questions {questions_file}: {len(questions)} are too few to choose by one half and judge by the other:"
            f" give {MIN_QUESTIONS} or more; a few hundred tell settings apart"
        )
    if out is not None and out.is_dir():
        raise SettingsError(f"--out {out} is a folder: give a file, such as tuned.yaml")
    index = open_index(folder, settings)
    tuned, held_out = split_questions(questions)
    report: Report = {"tuned_on": len(tuned), "held_out": len(held_out)}
    with _open_progress() as progress:
        if RetrievalMode.HYBRID in index.searchers:
            if settings.rerank.model:
                raise SettingsError("tune fuses the rankings themselves: leave retriever.rerank empty")
            report["hybrid"] = _tune_fusion(index, questions_file, settings, tuned, held_out, progress)
        if (effort := _tune_effort(index, settings, tuned, held_out, recall, progress)) is not None:
            report["vectors"] = effort
    if len(report) == 2:
        raise SettingsError(
            f"{folder} has nothing to tune: its vector search is exact, or has no stored vectors to compare with"
            " (`forage index convert --vectors float16`), and hybrid search needs BM25 and vectors (`--mode hybrid`)"
        )
    parts = {name: report[name] for name in ("hybrid", "vectors") if name in report}
    found = {name: value for part in parts.values() for name, value in part["settings"].items()}
    text = yaml.safe_dump({"retriever": found} if found else {}, sort_keys=False)
    if as_json:
        typer.echo(json.dumps(report | {"settings": found}))
    else:
        console = TextConsole()
        for name, part in parts.items():
            console.print({"hybrid": _describe_fusion, "vectors": _describe_effort}[name](part))
            console.print(part["verdict"], markup=False, highlight=False)
        console.print(f"settings to paste:\n{text}" if found else "the present settings stay", markup=False)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        heading = f"# forage index tune: {len(tuned)} questions chose, {len(held_out)} others judged.\n"
        out.write_text(heading + text, encoding="utf-8")


def compare_fusions(judged: Sequence[Judged], chosen: Fusion, present: Fusion) -> tuple[float, float, float]:
    """The mean gain in nDCG@10 of one fusion over another, and its 95 % interval."""
    gains = score_fusion(judged, chosen) - score_fusion(judged, present)
    return float(gains.mean()), *bootstrap(gains)


def _tune_fusion(
    index: load.Index,
    file: Path,
    settings: RetrieverSettings,
    tuned: Sequence[GoldQuestion],
    held_out: Sequence[GoldQuestion],
    progress: Progress,
) -> Report:
    task = progress.add_task("searching", total=len(tuned) + len(held_out))
    chooses = judge(index, tuned, lambda done: progress.update(task, completed=done))
    judges = judge(index, held_out, lambda done: progress.update(task, completed=len(tuned) + done))
    if not any(one.gold for one in (*chooses, *judges)):
        raise DataError(f"questions {file}: no gold passage was found at all: are gold_ids ids of this index's corpus?")
    present = Fusion.from_settings(settings)
    fusions = list_fusions()
    task = progress.add_task("fusing", total=len(fusions))
    scores = {}
    for fusion in fusions:
        scores[fusion] = float(score_fusion(chooses, fusion).mean())
        progress.advance(task)
    chosen = max(scores, key=lambda fusion: scores[fusion])
    gain, low, high = compare_fusions(judges, chosen, present)
    rows = {"present": present.fuse, "chosen": chosen.fuse}
    rows |= {str(part): partial(_take, place) for place, part in enumerate(PARTS) if part != load.TITLE}
    quality = {name: _measure(index, judges, rank) for name, rank in rows.items()}
    before, after = (quality[name]["recall@10"] or 0.0 for name in ("present", "chosen"))
    better = low > 0 and after >= before
    interval = f"{gain:+.4f} nDCG@{TOPK} on the held-out questions (95 % interval {low:+.4f} to {high:+.4f})"
    falls = f"recall@10 falls from {before:.4f} to {after:.4f}"
    verdict = "better" if better else f"{falls if low > 0 else 'within noise'}, so nothing changes"
    return {
        "present": vars(present),
        "chosen": vars(chosen),
        "gain": round(gain, 5),
        "interval": [round(low, 5), round(high, 5)],
        "quality": quality,
        "settings": {k: v for k, v in vars(chosen).items() if vars(present)[k] != v} if better else {},
        "verdict": f"{interval}: {verdict}",
    }


def _take(place: int, rankings: Sequence[list[int]]) -> list[int]:
    return rankings[place]


def _measure(index: load.Index, judged: Sequence[Judged], rank: Any) -> dict[str, float | None]:
    ids = [[index.corpus.ids[row] for row in rank(one.rankings)[:TOPK]] for one in judged]
    metrics = compute_metrics([one.question for one in judged], ids)
    return {name: metrics[name] for name in _SHOWN}


def _tune_effort(
    index: load.Index,
    settings: RetrieverSettings,
    tuned: Sequence[GoldQuestion],
    held_out: Sequence[GoldQuestion],
    recall: float | None,
    progress: Progress,
) -> Report | None:
    """The fastest effort that finds the share of the exact nearest; None: there is no effort to choose, or no truth.

    Without a share the present one counts: nothing that finds less is recommended.
    """
    from forage_retriever.search.vector_index import Effort

    dense = index.searchers.get(RetrievalMode.DENSE)
    if not isinstance(dense, DenseIndex):
        return None
    vectors = dense.vectors
    if not (vectors.has_graph or vectors.cells or vectors.stores_vectors):
        return None
    queries = dense.encoder.encode_queries([question.text for question in (*tuned, *held_out)])
    exact = vectors.search_exact(queries, TOPK)
    if exact is None:
        return None
    halves = slice(len(tuned)), slice(len(tuned), None)

    def measure(own: Mapping[str, Any]) -> tuple[float, float]:
        """The share that an effort finds of both halves of the questions."""
        effort = Effort(*(int(own.get(name, getattr(settings, name))) for name in ("ef_search", "nprobe", "refine")))
        found = vectors.search(queries, TOPK, effort=effort)[1]
        first, second = (compute_overlap(found[half], exact[half]) for half in halves)
        return first, second

    now = measure({})
    least, least_held_out = (recall, recall) if recall is not None else (max(LEAST_RECALL, share) for share in now)
    task = progress.add_task("searching vectors", total=None)
    points = measure_efforts(index, tuned, lambda done, total: progress.update(task, completed=done, total=total))
    reached = [point for point in points if point["top10"] >= round(least, 4)]
    chosen = max(reached, key=lambda point: point["qps"]) if reached else max(points, key=lambda point: point["top10"])
    swept = {name: chosen[name] for name in ("ef_search", "nprobe", "refine") if chosen[name] is not None}
    present = {name: getattr(settings, name) for name in swept}
    share = measure(swept)[1]
    enough = share >= least_held_out
    changed = {name: value for name, value in swept.items() if present[name] != value}
    judgement = ""
    if share < now[1]:
        judgement = f", now {now[1]:.4f}"
    if not enough:
        judgement += f"; less than {least_held_out:.4g}, so nothing changes"
        if least_held_out > now[1]:
            judgement += ": build with more cells, finer codes or stored vectors"
    return {
        "points": points,
        "present": present | {"top10": round(now[1], 4)},
        "chosen": swept | {"top10": round(share, 4), "qps": chosen["qps"]},
        "settings": changed if enough else {},
        "verdict": f"on the held-out questions {share:.4f} of the exact top {TOPK}{judgement}",
    }


def _describe_fusion(report: Mapping[str, Any]) -> Table:
    table = Table(title="hybrid search on held-out questions")
    for title in ("", "bm25 : dense : title", "rrf_k", *_SHOWN):
        table.add_column(title, justify="left" if not title else "right")
    for name, row in report["quality"].items():
        fusion = report.get(name)
        named = [] if fusion is None else [fusion[f"{one}_weight"] for one in ("bm25", "dense", "title")]
        weights = ":".join(f"{weight:g}" for weight in named)
        cells = ("–" if (value := row[one]) is None else f"{value:.3f}" for one in _SHOWN)
        table.add_row(name, weights, "" if fusion is None else str(fusion["rrf_k"]), *cells)
    return table


def _describe_effort(report: Mapping[str, Any]) -> Table:
    table = Table(title="vector search on held-out questions: share of the exact top 10")
    names = [name for name in report["chosen"] if name not in ("top10", "qps")]
    for title in ("", *names, "top-10"):
        table.add_column(title, justify="left" if not title else "right")
    for row in ("present", "chosen"):
        values = report[row]
        table.add_row(row, *(str(values[name]) for name in names), f"{values['top10']:.4f}")
    return table


def _open_progress() -> Progress:
    console = TextConsole(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)
