"""`forage data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(help="Make data sets.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Make data sets."""


@app.command()
def world(
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("data/world"),
    seed: Annotated[int, typer.Option(help="Of splits, draws and phrasings.", min=0)] = 0,
) -> None:
    """Make the built-in task: a corpus of world facts, and one- and two-hop questions split by entity."""
    from forage_common.world.write import build

    console = Console()
    with console.status("making the world facts …"):
        summary = build(out, seed)
    console.print(summary, highlight=False)
