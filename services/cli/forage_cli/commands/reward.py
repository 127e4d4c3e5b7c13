"""`forage reward`."""

from __future__ import annotations

import os
import sys

import typer


def reward(context: typer.Context) -> None:
    """List rewards, explain one score, or score a dump of trajectories ([bold]forage reward --help[/])."""
    # Rewards live in the service's own environment, which this one does not import: its command takes over.
    from forage_cli.local.stack import Program, interpreter

    python = str(interpreter(Program.REWARD))
    environment = {**os.environ, "FORAGE_PARQUET_PYTHON": sys.executable}
    os.execve(python, [python, "-m", "forage_reward.command", *context.args], environment)
