"""`forage index`."""

from __future__ import annotations

import os
import sys

import typer


def index(context: typer.Context) -> None:
    """Build, inspect, verify, measure or convert an index of the retriever ([bold]forage index --help[/])."""
    # FAISS and encoders live in the service's own environment, which this one does not import: its command takes over.
    from forage_cli.local.stack import Program, interpreter

    python = str(interpreter(Program.RETRIEVER))
    environment = {**os.environ, "FORAGE_PARQUET_PYTHON": sys.executable}
    os.execve(python, [python, "-m", "forage_retriever.command", *context.args], environment)
