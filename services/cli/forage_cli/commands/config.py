"""`forage config`."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.syntax import Syntax

from forage_cli.commands.options import Config, Overrides

app = typer.Typer(help="Show and check settings.", no_args_is_help=True)


@app.command()
def show(overrides: Overrides = None, config: Config = None) -> None:
    """Print the resolved settings: file, then environment (FORAGE__RUN__SEED=1), then arguments."""
    from forage_common.settings import load_settings

    console = Console()
    text = load_settings(config, overrides or []).to_yaml()
    if console.is_terminal:
        console.print(Syntax(text, "yaml", background_color="default"))
    else:
        typer.echo(text, nl=False)


@app.command()
def check(overrides: Overrides = None, config: Config = None) -> None:
    """Check settings and every file they name, without starting anything."""
    from forage_cli.local.preflight import check_files
    from forage_common.settings import load_settings

    check_files(load_settings(config, overrides or []))
    typer.echo("settings are valid, and the files they name are what they should be")
