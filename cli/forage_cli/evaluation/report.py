"""The HTML pages of an evaluation and of a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forage_cli.evaluation import plots
from forage_cli.evaluation.compare import Comparison, Pair, Selection, read_first_samples
from forage_cli.evaluation.layouts import SEARCH_R1, make_search_r1_rows
from forage_cli.evaluation.measures import QuestionResult
from forage_cli.evaluation.methods import Method
from forage_cli.evaluation.results import group_by_source, read_rows, write_summary
from forage_cli.reports import figures, page
from forage_records.statistics import ALL, Outcome
from forage_runtime.files import durable

REPORT, COMPARISON = "report.html", "comparison.html"
SHOWN = 24
"""Largest number of questions whose trajectories a page shows."""
_PACKAGE = "forage_cli.evaluation"
_NAME = ("policy", "method", "data source")
_ANSWERS = (*_NAME, "questions", "failed", "EM", "from", "to", "sub-EM", "F1")
_BEHAVIOUR = {
    "searches": "searches",
    "turns": "turns",
    "hit": "hit rate",
    "format": "format rate",
    "truncated": "truncated",
    "finished": "answered",
    "prompt_tokens": "prompt",
    "generated_tokens": "generated",
    "seconds": "seconds",
}


def write_report(folder: Path) -> dict[str, Any]:
    """Write results.json and report.html from an evaluation's rows and trajectories; returns the former's content.

    Raises:
        DataError: the folder is no finished evaluation.
    """
    summary = write_summary(folder)
    results = summary["results"]
    single = [entry for entry in results if entry["data_source"] != ALL]
    numbers = sorted({int(k) for entry in results for k in entry.get("pass_at_k", ())})
    text = page.render(
        "evaluation.html",
        _PACKAGE,
        summary=summary,
        tiles_shown=_make_tiles(results),
        answer_columns=_ANSWERS,
        answer_rows=[_answer_cells(entry) for entry in results],
        way_columns=[*_NAME, *_BEHAVIOUR.values()],
        way_rows=[[*_name_cells(entry), *(entry[key] for key in _BEHAVIOUR)] for entry in results],
        em=figures.render_svg(plots.plot_exact_match(results), "Exact match by policy and method, with intervals"),
        searches=figures.render_svg(plots.plot_searches(single), "Exact match against searches a question"),
        samples=figures.render_svg(plots.plot_samples(results), "pass@k and majority@k over k samples")
        if numbers
        else None,
        k_columns=[*_NAME, *(f"{kind}@{k}" for kind in ("pass", "majority") for k in numbers)],
        k_rows=[[*_name_cells(entry), *_sample_cells(entry, numbers)] for entry in results],
        layout_columns=["policy", "method", *SEARCH_R1.values(), "Avg."],
        layout_rows=[
            (line.policy, line.method.display_name, *line.em, line.average) for line in make_search_r1_rows(results)
        ],
        questions=_select_questions(folder),
        failures=[list(entry.values()) for entry in summary["failures"]],
        policies=[list(entry.values()) for entry in summary["policies"]],
    )
    _write_page(folder / REPORT, text)
    return summary


def write_comparison(found: Comparison, file: Path) -> Path:
    """Write the page of a comparison: won and lost questions side by side."""
    kinds = (Outcome.WON, Outcome.LOST)
    chosen = {outcome: found.pairs_with(outcome)[:SHOWN] for outcome in kinds}
    uids = [pair.a.uid for pairs in chosen.values() for pair in pairs]
    sides = [read_first_samples(selection, uids) for selection in (found.a, found.b)]
    total = found.sources[-1]
    text = page.render(
        "comparison.html",
        _PACKAGE,
        found=found,
        total=total,
        rows=[
            (
                *(part.data_source, part.questions, part.em_a, part.em_b),
                *(part.difference.mean, part.difference.low, part.difference.high, f"{part.difference.p:.4f}"),
                *(part.outcomes[outcome] for outcome in Outcome),
            )
            for part in found.sources
        ],
        parts=[
            (
                outcome,
                total.outcomes[outcome],
                [_make_sides(pair, (found.a, found.b), sides) for pair in chosen[outcome]],
            )
            for outcome in kinds
        ],
    )
    return _write_page(file, text)


def _write_page(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    durable.write_atomically(file, text)
    return file


def _make_tiles(results: Sequence[Mapping[str, Any]]) -> list[tuple[float | None, str]]:
    whole = {plots.format_series(entry): entry for entry in results}  # the last of a series is that of all data sources
    return [(entry["em"]["mean"] if entry["em"] else None, f"EM, {name}") for name, entry in whole.items()]


def _name_cells(entry: Mapping[str, Any]) -> list[str]:
    return [entry["policy"], Method(entry["method"]).display_name, entry["data_source"]]


def _answer_cells(entry: Mapping[str, Any]) -> list[Any]:
    em = entry["em"] or dict.fromkeys(("mean", "low", "high"))
    means = [entry[key]["mean"] if entry[key] else None for key in ("sub_em", "f1")]
    counts = entry["questions"], entry["failed_questions"]
    return [*_name_cells(entry), *counts, em["mean"], em["low"], em["high"], *means]


def _sample_cells(entry: Mapping[str, Any], numbers: Iterable[int]) -> list[float | None]:
    found = [entry.get(kind, {}).get(str(k)) for kind in ("pass_at_k", "majority_at_k") for k in numbers]
    return [value["mean"] if value else None for value in found]


def _select_questions(folder: Path) -> list[dict[str, Any]]:
    """Select questions to show: first those that some policies or methods got right and others wrong."""
    rows = read_rows(folder)
    asked: dict[str, list[QuestionResult]] = {}
    for row in rows:
        asked.setdefault(row.uid, []).append(row)

    def spread(some: Sequence[QuestionResult]) -> float:
        known = [row.em for row in some if row.em is not None]
        return max(known, default=0.0) - min(known, default=0.0)

    chosen = sorted(asked, key=lambda uid: (-spread(asked[uid]), uid))[:SHOWN]
    texts = {
        (policy, method): read_first_samples(Selection(folder, policy, method), chosen)
        for policy, method, _ in group_by_source([row for uid in chosen for row in asked[uid]])
    }
    return [
        {
            "question": asked[uid][0].question,
            "uid": uid,
            "targets": asked[uid][0].targets,
            "sides": [
                (f"{row.policy} · {Method(row.method).display_name}", row, texts[row.policy, row.method].get(uid))
                for row in asked[uid]
            ],
        }
        for uid in chosen
    ]


def _make_sides(pair: Pair, selections: Sequence[Selection], texts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    both = zip("AB", (pair.a, pair.b), selections, texts, strict=True)
    return {
        "question": pair.a.question,
        "uid": pair.a.uid,
        "targets": pair.a.targets,
        "sides": [(f"{side}: {selection}", row, found.get(row.uid)) for side, row, selection, found in both],
    }
