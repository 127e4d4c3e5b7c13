"""Terminal tables of an evaluation and of a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.text import Text

from forage_cli.evaluation.cards import Verdict, Verified
from forage_cli.evaluation.compare import Comparison
from forage_cli.evaluation.layouts import SEARCH_R1, LayoutRow
from forage_cli.evaluation.methods import Method
from forage_cli.terminal import trajectories as show
from forage_cli.terminal.tables import format_number, make_table
from forage_proto.v1.trajectory_pb2 import Trajectory
from forage_records.spans import name_author
from forage_records.statistics import Outcome

Metrics = Mapping[str, Any]


def render_results(results: Sequence[Metrics]) -> RenderableType:
    """Render all metrics of results.json as tables."""
    failed = ["failed"] if any(entry["failed_questions"] for entry in results) else []
    answers = _ResultTable(results, "answers", "n", *failed, "EM", "95 % interval", "sub-EM", "F1")
    ways = _ResultTable(results, "behaviour", "searches", "turns", "hit", "format", "cut", "tokens", "s")
    for entry in results:
        em = entry["em"]
        answers.add_result(
            entry,
            str(entry["questions"]),
            *(Text(str(entry["failed_questions"]), "yellow") for _ in failed),
            *(("–", "–") if em is None else (f"{em['mean']:.3f}", f"{em['low']:.3f} … {em['high']:.3f}")),
            *(format_number(entry[key] and entry[key]["mean"]) for key in ("sub_em", "f1")),
        )
        ways.add_result(
            entry,
            *(format_number(entry[key], 2) for key in ("searches", "turns", "hit", "format", "truncated")),
            f"{format_number(entry['prompt_tokens'], 0)}+{format_number(entry['generated_tokens'], 0)}",
            format_number(entry["seconds"], 2),
        )
    sampled = any("pass_at_k" in entry for entry in results)
    return Group(answers.table, ways.table, *([_render_samples(results).table] if sampled else []))


def render_search_r1(lines: Iterable[LayoutRow]) -> RenderableType:
    """Render the table of the Search-R1 paper."""
    title = "exact match, † trained on by the paper"
    table = make_table("policy", "method", *SEARCH_R1.values(), "Avg.", left=2, title=title)
    for line in lines:
        table.add_row(
            line.policy, line.method.display_name, *(format_number(value) for value in (*line.em, line.average))
        )
    return table


def render_comparison(found: Comparison) -> RenderableType:
    """Render means, differences and outcomes by data source."""
    means = make_table("data source", "A", "B", "B − A", "95 % interval", "p", title="exact match")
    outcomes = make_table("data source", "n", *Outcome, title="questions, from A to B")
    for part in found.sources:
        difference = part.difference
        style = "" if difference.low <= 0 <= difference.high else "green" if difference.mean > 0 else "red"
        means.add_row(
            part.data_source,
            f"{part.em_a:.3f}",
            f"{part.em_b:.3f}",
            Text(f"{difference.mean:+.3f}", style),
            f"{difference.low:+.3f} … {difference.high:+.3f}",
            f"{difference.p:.4f}",
        )
        counts = (str(part.outcomes[outcome]) for outcome in Outcome)
        outcomes.add_row(part.data_source, str(part.questions), *counts)
    sides: list[RenderableType] = [Text(f"A  {found.a}"), Text(f"B  {found.b}")]
    if found.only_a or found.only_b:
        sides.append(Text(f"left out: {found.only_a} questions of A alone, {found.only_b} of B alone", "yellow"))
    return Group(*sides, means, outcomes)


def render_verified(verified: Iterable[Verified]) -> RenderableType:
    """Render the numbers of a card beside the same ones, computed again."""
    table = make_table("policy", "method", "data source", "n", "card", "95 % interval", "again", "verdict", left=3)
    for card, again, verdict in verified:
        once, twice = card.em, again.em if again else None
        style = {Verdict.SAME: "green", Verdict.AGREES: "green", Verdict.DISAGREES: "red"}[verdict]
        failed = f", {again.failed_questions} failed" if again and again.failed_questions else ""
        table.add_row(
            card.policy,
            Method(card.method).display_name,
            card.data_source,
            str(card.questions),
            format_number(once.mean if once else None),
            "–" if once is None else f"{once.low:.3f} … {once.high:.3f}",
            format_number(twice.mean if twice else None),
            Text(f"{verdict}{failed}", style),
        )
    return table


def render_side_by_side(trajectories: Sequence[Trajectory | None], title: str, width: int) -> RenderableType:
    """Render trajectories of one question, A's left and B's right."""
    each = max(20, width // 2 - 1)
    panels = [
        show.render_panel(_make_row(t, title), title=side) for t, side in zip(trajectories, "AB", strict=True) if t
    ]
    return Columns(panels, width=each)


def _make_row(trajectory: Trajectory, question: str) -> dict[str, Any]:
    return {
        "question": question,
        "targets": list(trajectory.ground_truth.targets),
        "em": trajectory.validation_score.total,
        "spans": [{"role": name_author(span), "text": span.text} for span in trajectory.spans],
    }


class _ResultTable:
    """Table with one row per policy, method and data source; a single data source is named in the title instead."""

    def __init__(self, results: Sequence[Metrics], title: str, *columns: str) -> None:
        sources = {entry["data_source"] for entry in results}
        self._names_source = len(sources) > 1
        title = title if self._names_source else f"{title}: {', '.join(sources)}"
        names = ("policy", "method", *(["data source"] if self._names_source else []))
        self.table = make_table(*names, *columns, left=len(names), title=title)

    def add_result(self, entry: Metrics, *cells: str | Text) -> None:
        source = [entry["data_source"]] if self._names_source else []
        self.table.add_row(entry["policy"], Method(entry["method"]).display_name, *source, *cells)


def _render_samples(results: Sequence[Metrics]) -> _ResultTable:
    numbers = sorted({int(k) for entry in results for k in entry.get("pass_at_k", ())})
    columns = *(f"pass@{k}" for k in numbers), *(f"maj@{k}" for k in numbers if k > 1)
    table = _ResultTable(results, "over k samples", *columns)
    for entry in results:
        row = []
        for kind, least in (("pass_at_k", 1), ("majority_at_k", 2)):
            for k in numbers:
                if k >= least:
                    found = entry.get(kind, {}).get(str(k))
                    row.append(format_number(found and found["mean"]))
        table.add_result(entry, *row)
    return table
