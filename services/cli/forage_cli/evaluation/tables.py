"""What the terminal shows of an evaluation and of a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forage_cli.evaluation.compare import Comparison, Outcome
from forage_cli.evaluation.layouts import SEARCH_R1, Line
from forage_cli.evaluation.methods import Method
from forage_cli.terminal import trajectories as show
from forage_common.v1.trajectory_pb2 import Role, Trajectory

Figures = Mapping[str, Any]


def figures(results: Sequence[Figures]) -> RenderableType:
    """Every figure of results.json, in tables that fit a terminal."""
    failed = ["failed"] if any(entry["failed_questions"] for entry in results) else []
    answers = _Table(results, "what was answered", "n", *failed, "EM", "95 % interval", "sub-EM", "F1")
    ways = _Table(results, "how it was found", "searches", "turns", "hit", "format", "cut", "tokens", "s")
    for entry in results:
        em = entry["em"]
        answers.add(
            entry,
            str(entry["questions"]),
            *(Text(str(entry["failed_questions"]), "yellow") for _ in failed),
            *(("–", "–") if em is None else (f"{em['mean']:.3f}", f"{em['low']:.3f} … {em['high']:.3f}")),
            *("–" if entry[key] is None else f"{entry[key]['mean']:.3f}" for key in ("sub_em", "f1")),
        )
        ways.add(
            entry,
            *(_number(entry[key], 2) for key in ("searches", "turns", "hit", "format", "truncated")),
            f"{_number(entry['prompt_tokens'], 0)}+{_number(entry['generated_tokens'], 0)}",
            _number(entry["seconds"], 2),
        )
    sampled = any("pass_at_k" in entry for entry in results)
    return Group(answers.table, ways.table, *([_samples(results).table] if sampled else []))


def search_r1(lines: Iterable[Line]) -> RenderableType:
    """The table of the Search-R1 paper."""
    table = _plain("exact match, † trained on by the paper", "policy", "method", *SEARCH_R1.values(), "Avg.", left=2)
    for line in lines:
        table.add_row(line.policy, line.method.words, *(_number(value, 3) for value in (*line.em, line.average)))
    return table


def comparison(found: Comparison) -> RenderableType:
    """Means and differences, and what became of the questions, by data source."""
    means = _plain("exact match", "data source", "A", "B", "B − A", "95 % interval", "p")
    outcomes = _plain("questions, from A to B", "data source", "n", *Outcome)
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


def side_by_side(trajectories: Sequence[Trajectory | None], title: str, width: int) -> RenderableType:
    """The same question, A's text left and B's right."""
    each = max(20, width // 2 - 1)
    panels = [show.panel(_row(t, title), title=side) for t, side in zip(trajectories, "AB", strict=True) if t]
    return Columns(panels, width=each)


def _row(trajectory: Trajectory, question: str) -> dict[str, Any]:
    return {
        "question": question,
        "targets": list(trajectory.ground_truth.targets),
        "em": trajectory.validation_score.total,
        "spans": [
            {"role": Role.Name(span.role).removeprefix("ROLE_").lower(), "text": span.text} for span in trajectory.spans
        ],
    }


class _Table:
    """A row a policy, method and data source; where there is one data source, the title names it."""

    def __init__(self, results: Sequence[Figures], title: str, *columns: str) -> None:
        sources = {entry["data_source"] for entry in results}
        self._names_source = len(sources) > 1
        title = title if self._names_source else f"{title}: {', '.join(sources)}"
        names = ("policy", "method", *(["data source"] if self._names_source else []))
        self.table = _plain(title, *names, *columns, left=len(names))

    def add(self, entry: Figures, *cells: str | Text) -> None:
        source = [entry["data_source"]] if self._names_source else []
        self.table.add_row(entry["policy"], Method(entry["method"]).words, *source, *cells)


def _samples(results: Sequence[Figures]) -> _Table:
    numbers = sorted({int(k) for entry in results for k in entry.get("pass_at_k", ())})
    columns = *(f"pass@{k}" for k in numbers), *(f"maj@{k}" for k in numbers if k > 1)
    table = _Table(results, "over k samples", *columns)
    for entry in results:
        row = []
        for kind, least in (("pass_at_k", 1), ("majority_at_k", 2)):
            for k in numbers:
                if k >= least:
                    found = entry.get(kind, {}).get(str(k))
                    row.append("–" if found is None else f"{found['mean']:.3f}")
        table.add(entry, *row)
    return table


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _plain(title: str, *columns: str, left: int = 1) -> Table:
    """A table without lines. left: columns of words, at its beginning."""
    table = Table(title=title, box=None, header_style="dim", title_justify="left", title_style="bold")
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place < left else "right", no_wrap=True)
    return table
