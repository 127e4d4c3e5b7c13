"""`forage train` and `forage demo`: a whole training on this machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from forage_cli.commands.options import BasePort, Config, Overrides, WithConsole
from forage_runtime.text.console import TextConsole

if TYPE_CHECKING:
    from forage_runtime.settings import Settings

Detach = Annotated[
    bool,
    typer.Option("--detach", "-d", help="Train in the background; 'forage logs -f' and 'forage status' show it."),
]


def train(
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run of that id; without --config the latest run.")
    ] = False,
    detach: Detach = False,
    console: WithConsole = True,
    config: Config = None,
    base_port: BasePort = None,
) -> None:
    """Train by a file of settings on this machine: start every service, show the run live, write its report.

    The run has the id of the settings, run.id, and its folder is <run.dir>/<run.id>. An id that has a run already is
    an error: --resume continues it, from its newest checkpoint. Ctrl-C stops all services.

    Examples:

      forage train -c my.yaml run.id=first

      forage train -c my.yaml run.id=first --resume trainer.total_training_steps=500

      forage train --resume

      forage train -c my.yaml run.id=second --detach && forage logs trainer -f
    """
    from forage_cli.local.training import load

    settings = load.load_train_settings(config, overrides or [], base_port, resume)
    command = ["train", *(["--config", str(config)] if config else [])]
    _start(settings, console, detach, command, resume, base_port, overrides or [])


def demo(
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(help="Seed of data order and sampling.", min=0)] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the latest run.")] = False,
    detach: Detach = False,
    console: WithConsole = True,
    config: Config = None,
    base_port: BasePort = None,
) -> None:
    """Train the tiny policy to search world facts on this machine, in five to ten minutes.

    It is 'forage train' by configs/demo.yaml, with a new run id for each start. Starts every service on loopback,
    shows the run live, here and in the console (a page for a browser), validates before and after training on entities
    that training never saw, and writes a report to runs/latest. Ctrl-C stops all services; --resume continues.

    Examples:

      forage demo

      forage demo --seed 1 trainer.total_training_steps=50
    """
    from forage_cli.local.training import load

    if resume:
        settings = load.load_resumed_settings(overrides or [], base_port)
    else:
        settings = load.load_demo_settings(seed, config, overrides or [], base_port)
    command = ["demo", *(["--config", str(config)] if config else []), "--seed", str(settings.run.seed)]
    _start(settings, console, detach, command, resume, base_port, overrides or [])


def _start(
    settings: Settings,
    console: bool,
    detach: bool,
    command: list[str],
    resume: bool,
    base_port: int | None,
    overrides: list[str],
) -> None:
    """Train in this process, or in one of its own by the same command."""
    from forage_cli.local.training.detached import start_detached
    from forage_cli.local.training.load import check_not_in_use
    from forage_cli.local.training.run import run_training

    output = TextConsole(soft_wrap=True, highlight=False) if detach else TextConsole()
    if not detach:
        run_training(settings, output, console, f"forage {command[0]} --resume")
        return
    check_not_in_use(settings)
    options = ["--resume"] if resume else []
    options += [] if console else ["--no-console"]
    options += ["--base-port", str(base_port)] if base_port else []
    # The id last, so that the other process trains the run that this one has named.
    pid = start_detached(settings, [*command, *options, *overrides, f"run.id={json.dumps(settings.run.id)}"])
    output.print(f"{settings.run.id} trains in the background, process {pid}: 'kill {pid}' stops it")
    output.print(f"look: forage logs --run {settings.run.folder} -f")
    output.print(f"to continue it, once it was stopped: forage train -c {settings.run.folder}/settings.yaml --resume")
