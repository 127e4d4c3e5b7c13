"""`forage trajectories`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


class Label(StrEnum):
    BEFORE = "before"
    AFTER = "after"


def trajectories(
    run: Annotated[Path, typer.Argument(help="A run's folder.")] = Path("runs/latest"),
    label: Annotated[Label, typer.Option(help="Which validation.")] = Label.AFTER,
    count: Annotated[int, typer.Option("--count", "-n", min=1)] = 5,
    wrong: Annotated[bool, typer.Option("--wrong", help="Only wrong answers.")] = False,
    right: Annotated[bool, typer.Option("--right", help="Only right answers.")] = False,
    find: Annotated[str, typer.Option(help="Only where question or text holds this.")] = "",
) -> None:
    """Read a run's trajectories: what the policy wrote (bold), what it was shown (cyan), what was accepted."""
    from forage_common.errors import DataError
    from forage_common.local import show
    from forage_common.local.runs import RunFolder

    console = Console()
    rows = RunFolder.open(run).trajectories(label)
    if not rows:
        raise DataError(f"{run} has no trajectories of '{label}' yet: wait for its validation to end")
    chosen = [
        row
        for row in rows
        if (wrong or right) is False or (right and row["em"] > 0) or (wrong and not row["em"] > 0)
        if find in row["question"] or any(find in span["text"] for span in row["spans"])
    ]
    for row in chosen[:count]:
        console.print(show.panel(row))
    console.print(f"{min(count, len(chosen))} of {len(chosen)} shown, {len(rows)} in all", style="dim")
