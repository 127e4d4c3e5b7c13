"""Trajectories for people: who wrote what, in colour."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from forage_common.local.runs import Row
from forage_common.v1.rollout_pb2 import RunStreamResponse

STYLES = {"model": "bold", "env": "cyan", "prompt": "dim"}


def happened(event: RunStreamResponse) -> Text:
    """A turn as it happens: what the policy said (bold), or what it is shown in return (cyan)."""
    author = "model" if event.WhichOneof("event") == "acted" else "env"
    return Text(event.text.strip("\n"), style=STYLES[author])


def panel(row: Row, title: str = "", judged: bool = True) -> RenderableType:
    """One trajectory: the question, then the policy's text (bold) and what it was shown (cyan)."""
    body = Text()
    for span in row["spans"]:
        if span["role"] != "prompt":
            body.append(span["text"], style=STYLES.get(span["role"], ""))
    right = float(row.get("em") or 0) > 0
    verdict = Text()
    if judged:
        verdict.append("right" if right else "wrong", style="bold green" if right else "bold red")
        verdict.append(f"   accepted: {' | '.join(row.get('targets') or ['–'])}", style="dim")
    style = ("green" if right else "red") if judged else "blue"
    question = Text(row["question"], style="bold magenta")
    return Panel(Group(question, body, verdict), title=title or None, border_style=style, title_align="left")
