"""`forage security`."""

from __future__ import annotations

import typer

from forage_cli.commands.security import keys

app = typer.Typer(help="Make the keys that protect a deployment.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Make the keys that protect a deployment."""


app.command("keys")(keys.keys)
