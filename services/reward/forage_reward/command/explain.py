"""How a reward came to its score, for people: the format's path token by token, answer, evidence, components."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from forage_common.text.answers import em_check, is_retrieval_correct
from forage_reward.command.dumps import DumpRow
from forage_reward.parsing.answers import extract_solution, observations
from forage_reward.parsing.sequence import is_valid_sequence, walk
from forage_reward.score import Score, Status

MAX_SHOWN = 200
_EXCERPT = 60


def explained(row: DumpRow, score: Score) -> Iterator[RenderableType]:
    """What to print, in order."""
    part = row.view.assistant_part
    yield _path(part)
    verdict = is_valid_sequence(part)
    yield _fact("format", "valid" if verdict.valid else f"invalid: {verdict.reason}", verdict.valid)
    answer = extract_solution(row.view)
    if row.truth.targets:
        found = is_retrieval_correct(observations(row.view), row.truth.targets)
        right = answer is not None and em_check(answer, row.truth.targets)
        yield _fact("answer", "none" if answer is None else repr(answer[:_EXCERPT]), right)
        yield _fact("accepted", ", ".join(map(repr, row.truth.targets))[:200], True)
        yield _fact("evidence", "holds an accepted answer" if found else "holds no accepted answer", found)
    yield _components(score)
    yield _fact("rule", score.detail, score.status is Status.OK)


def _path(part: str) -> Table:
    table = Table("state", "reads", "goes to", title="format, token by token", title_justify="left")
    steps = walk(part)
    for step in islice(steps, MAX_SHOWN):
        token = " ".join(step.token.split())
        shown = token if len(token) <= _EXCERPT else token[:_EXCERPT] + "…"
        if step.after is None:
            table.add_row(step.before, Text(shown, style="red"), Text("not allowed here", style="bold red"))
        else:
            table.add_row(step.before, Text(shown), Text(step.after if step.after != step.before else "stays"))
    if next(steps, None) is not None:
        table.add_row("…", f"more than {MAX_SHOWN} tokens", "…")
    return table


def _components(score: Score) -> Table:
    table = Table("component", "raw", "adds", title=f"score of {score.reward}", title_justify="left", show_footer=True)
    for component in score.components:
        adds = "for logs" if component.name.startswith("_") else f"{component.weighted:+.4g}"
        table.add_row(Text(component.name), f"{component.raw:.4g}", adds)
    total = f"{score.total:.4g}" if score.status is Status.OK else score.status.value.upper()
    table.columns[0].footer, table.columns[2].footer = "total", Text(total, style="bold")
    return table


def _fact(name: str, value: str, good: bool) -> Text:
    return Text.assemble((f"{name:9}", "dim"), (value, "green" if good else "red"))
