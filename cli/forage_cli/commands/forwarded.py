"""`forage index`, `reward`, `trainer`, `worker`, `serve`: run in the environment of their service."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

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
    ForwardedCommand("worker", "rollout", "Run an agent of your own in the sessions of the rollout service."),
)

_ARGUMENTS = "Arguments: -c FILE, key=value …; as of `python -m forage_{}` in its image."
SERVED = tuple(
    ForwardedCommand(name, name, f"{help} {_ARGUMENTS.format(name)}")
    for name, help in (
        ("retriever", "Search a corpus or an index over HTTP and gRPC."),
        ("reward", "Score trajectories over gRPC."),
    )
)

NAMES = frozenset({"serve", *(command.name for command in FORWARDED)})
"""Commands whose services parse the arguments and print the help."""


def add_forwarded(app: typer.Typer) -> None:
    """Add the forwarded commands; the service itself parses their arguments and prints their help."""
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    for command in FORWARDED:
        text = f"{command.help} Options: [bold]forage {command.name} --help[/]."
        run = _forward(command.service, f"forage_{command.service}.command")
        app.command(command.name, context_settings=settings, add_help_option=False, help=text)(run)
    serve = typer.Typer(no_args_is_help=True, help="Run one service in the foreground, until SIGTERM or Ctrl-C.")
    for command in SERVED:
        run = _forward(command.service, f"forage_{command.service}")
        serve.command(command.name, context_settings=settings, add_help_option=False, help=command.help)(run)
    app.add_typer(serve, name="serve")


def run_in_service(service: str, module: str, arguments: list[str]) -> NoReturn:
    """Replace this process by a module of a service, in its environment.

    Raises:
        UserError: the service is not installed.
    """
    from forage_cli.local.home import find_interpreter
    from forage_runtime.files.parquet_rows import PARQUET_READER

    # FAISS and torch are installed only in the environment of their service: its process replaces this one.
    python = str(find_interpreter(service))
    # Environments without pyarrow read and write Parquet through this interpreter.
    environment = {**os.environ, PARQUET_READER: sys.executable}
    os.execve(python, [python, "-m", module, *arguments], environment)


def _forward(service: str, module: str) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        run_in_service(service, module, context.args)

    return run
