"""Trajectories for people: who wrote what, in colour."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from forage_common.local.runs import Row
from forage_common.v1.trajectory_pb2 import Role, Trajectory

STYLES = {"model": "bold", "env": "cyan", "prompt": "dim"}
_ROLES = {Role.ROLE_PROMPT: "prompt", Role.ROLE_MODEL: "model", Role.ROLE_ENV: "env"}


def as_row(trajectory: Trajectory, question: str) -> Row:
    """A trajectory in the form in which runs keep them (`validation/*.jsonl`)."""
    return {
        "question": question,
        "targets": list(trajectory.ground_truth.targets),
        "em": trajectory.validation_score.total,
        "spans": [{"role": _ROLES.get(span.role, "?"), "text": span.text} for span in trajectory.spans],
    }


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
