"""`forage trainer`."""

from __future__ import annotations

import os

import typer


def trainer(context: typer.Context) -> None:
    """Export a checkpoint as a Hugging Face folder ([bold]forage trainer --help[/])."""
    # torch lives in the service's own environment, which this one does not import: its command takes over.
    from forage_cli.local.stack import Program, interpreter

    python = str(interpreter(Program.TRAINER))
    os.execv(python, [python, "-m", "forage_trainer.command", *context.args])
