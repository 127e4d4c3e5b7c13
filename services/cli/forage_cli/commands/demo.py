"""`forage demo`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from forage_cli.commands.options import BasePort, Config, Overrides


def demo(
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(help="Seed of data order and sampling.", min=0)] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the latest run.")] = False,
    config: Config = None,
    base_port: BasePort = None,
) -> None:
    """Train the tiny policy to search world facts on this machine, in five to ten minutes.

    Starts every service on loopback, shows the run live, validates before and after training on entities that training
    never saw, and writes a report to runs/latest. Ctrl-C stops all services; --resume continues.

    Examples:

      forage demo

      forage demo --seed 1 trainer.total_training_steps=50
    """
    from forage_cli.local import demo as local

    if resume:
        settings = local.load_resumed_settings(overrides or [])
    else:
        settings = local.load_demo_settings(seed, config, overrides or [], base_port)
    local.run_demo(settings, Console())
