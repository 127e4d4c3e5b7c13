"""Trajectories in a terminal, coloured by author."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from forage_cli.terminal.tables import make_table
from forage_proto.v1.rollout_pb2 import RunStreamResponse
from forage_records.run_folder import Row
from forage_runtime.text.terminal import printable

if TYPE_CHECKING:
    from forage_records.replay import Comparison

STYLES = {"model": "bold", "opening": "dim bold", "env": "cyan", "prompt": "dim"}


def render_event(event: RunStreamResponse) -> Text:
    """Render an event of a running trajectory: the policy's text (bold) or an observation (cyan)."""
    author = "model" if event.WhichOneof("event") == "acted" else "env"
    return Text(printable(event.text.strip("\n")), style=STYLES[author])


def render_panel(row: Row, title: str = "", body: Text | None = None) -> RenderableType:
    """Render one trajectory: the question, then the policy's text (bold) and observations (cyan).

    Args:
        body: shown instead of the texts.
    """
    if body is None:
        body = Text()
        for span in row["spans"]:
            if span["role"] != "prompt":
                body.append(printable(span["text"]), style=STYLES.get(span["role"], ""))
    em = row.get("em")
    judged, colour = ("not judged", "yellow") if em is None else ("right", "green") if em > 0 else ("wrong", "red")
    verdict = Text()
    verdict.append(judged, style=f"bold {colour}")
    if row.get("reward") is not None:
        verdict.append(f"   reward {row['reward']:.3g}", style="dim")
    verdict.append(printable(f"   accepted: {' | '.join(row.get('targets') or ['–'])}"), style="dim")
    if row.get("trace_id"):
        verdict.append(printable(f"   trace {row['trace_id']}"), style="dim")
    question = Text(printable(row["question"]), style="bold magenta")
    return Panel(
        Group(question, body, verdict), title=Text(title) if title else None, border_style=colour, title_align="left"
    )


def render_comparison(found: Comparison, rerun: bool) -> RenderableType:
    """Render the comparison of a replay.

    Args:
        rerun: also show where the texts diverge.
    """
    table = make_table("mean of", "before", "after", "changed", "of")
    for name, change in found.metrics.items():
        n = max(1, change.count)
        table.add_row(
            name, f"{change.before / n:.4f}", f"{change.after / n:.4f}", str(change.changed), str(change.count)
        )
    parts: list[RenderableType] = [table]
    if rerun:
        parts.append(Text(f"identical {found.diverged['']} of {found.total}"))
        parts += [Text(f"  {count} diverge at {where}") for where, count in found.diverged.most_common() if where]
        if found.unseeded:
            parts.append(
                Text(f"  {found.unseeded} had neither a seed nor temperature 0: they need not repeat", "yellow")
            )
    for (before, after), count in found.statuses.most_common():
        parts.append(Text(f"{count} went from {before} to {after}", style="yellow"))
    if found.largest:
        parts.append(Text("largest changes of the score", style="dim"))
    for _, id, one, other, detail in sorted(found.largest, reverse=True):
        parts.append(Text(printable(f"  {one:.4f} → {other:.4f}  {id}  {detail}")))
    return Group(*parts)
