"""`forage runs …`: the runs of a folder; `forage logs`; and what a recorded run proves."""

from __future__ import annotations

import typer

from forage_cli.commands.runs import folders
from forage_cli.commands.runs.history import check_history, compare_runs
from forage_cli.commands.runs.logs import logs

__all__ = ["app", "check_history", "compare_runs", "logs"]

app = typer.Typer(help="List, show, compare and remove runs.", no_args_is_help=True)
app.command("list")(folders.list_runs)
app.command("show")(folders.show)
app.command("diff")(folders.diff)
app.command("rm")(folders.remove)
