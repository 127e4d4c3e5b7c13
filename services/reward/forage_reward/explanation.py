"""The explanation of one score for people: the format's path token by token, answer, evidence, components."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from itertools import islice

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from forage_reward.parsing.answers import extract_observations, extract_solution
from forage_reward.parsing.sequence import is_valid_sequence, walk
from forage_reward.score import Score, Status
from forage_reward.trajectory import GroundTruth, TrajectoryView
from forage_runtime.text.answers import em_check, is_retrieval_correct
from forage_runtime.text.console import TextConsole

MAX_SHOWN = 200
_EXCERPT = 60
_COLUMNS = 100


def write_explanation(view: TrajectoryView, truth: GroundTruth, score: Score) -> str:
    """The explanation as plain text, in lines of at most 100 columns."""
    text = StringIO()
    console = TextConsole(file=text, width=_COLUMNS, color_system=None, legacy_windows=False)
    for part in render_explanation(view, truth, score):
        console.print(part, markup=False, highlight=False)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def render_explanation(view: TrajectoryView, truth: GroundTruth, score: Score) -> Iterator[RenderableType]:
    """Yield the parts of the explanation, in order."""
    text = view.assistant_part
    yield _render_path(text)
    result = is_valid_sequence(text)
    yield _render_fact("format", "valid" if result.valid else f"invalid: {result.reason}", result.valid)
    answer = extract_solution(view)
    if truth.targets:
        is_evidence = is_retrieval_correct(extract_observations(view), truth.targets)
        is_right = answer is not None and em_check(answer, truth.targets)
        yield _render_fact("answer", "none" if answer is None else repr(answer[:_EXCERPT]), is_right)
        yield _render_fact("accepted", ", ".join(map(repr, truth.targets))[:200], True)
        yield _render_fact(
            "evidence", "contains an accepted answer" if is_evidence else "contains no accepted answer", is_evidence
        )
    yield _render_components(score)
    yield _render_fact("rule", score.detail, score.status is Status.OK)


def _render_path(text: str) -> Table:
    table = Table("state", "reads", "next state", title="format, token by token", title_justify="left")
    steps = walk(text)
    for step in islice(steps, MAX_SHOWN):
        token = " ".join(step.token.split())
        excerpt = token if len(token) <= _EXCERPT else token[:_EXCERPT] + "…"
        if step.after is None:
            table.add_row(step.before, Text(excerpt, style="red"), Text("not allowed here", style="bold red"))
        else:
            table.add_row(step.before, Text(excerpt), Text(step.after if step.after != step.before else "stays"))
    if next(steps, None) is not None:
        table.add_row("…", f"more than {MAX_SHOWN} tokens", "…")
    return table


def _render_components(score: Score) -> Table:
    table = Table("component", "raw", "adds", title=f"score of {score.reward}", title_justify="left", show_footer=True)
    for component in score.components:
        adds = "for logs" if component.name.startswith("_") else f"{component.weighted:+.4g}"
        table.add_row(Text(component.name), f"{component.raw:.4g}", adds)
    total = f"{score.total:.4g}" if score.status is Status.OK else score.status.value.upper()
    table.columns[0].footer, table.columns[2].footer = "total", Text(total, style="bold")
    return table


def _render_fact(name: str, value: str, is_good: bool) -> Text:
    return Text.assemble((f"{name:9}", "dim"), (value, "green" if is_good else "red"))
