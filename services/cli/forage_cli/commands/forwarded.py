"""`forage index`, `forage reward` and `forage trainer`: commands that run in the environment of their service."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class ForwardedCommand:
    """A command of `forage` that a service implements: its name, the service and its help text."""

    name: str
    service: str
    help: str


FORWARDED = (
    ForwardedCommand("index", "retriever", "Build, inspect, verify, benchmark or convert an index of the retriever."),
    ForwardedCommand("reward", "reward", "List rewards, explain one score, or score a file of trajectories."),
    ForwardedCommand("trainer", "trainer", "Export a checkpoint as a Hugging Face model folder."),
)


def add_forwarded(app: typer.Typer) -> None:
    """Add the forwarded commands; the service itself parses their arguments and prints their help."""
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    for command in FORWARDED:
        text = f"{command.help} Options: [bold]forage {command.name} --help[/]."
        app.command(command.name, context_settings=settings, add_help_option=False, help=text)(_forward(command))


def _forward(command: ForwardedCommand) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        from forage_cli.local.stack import Program, find_interpreter
        from forage_common.files.parquet_rows import PARQUET_READER

        # FAISS and torch are installed only in the environment of their service: its process replaces this one.
        python = str(find_interpreter(Program(command.service)))
        # Environments without pyarrow read and write Parquet through this interpreter.
        environment = {**os.environ, PARQUET_READER: sys.executable}
        os.execve(python, [python, "-m", f"forage_{command.service}.command", *context.args], environment)

    return run
