"""Start and end of every command; apart from `service`, whose imports would slow down `forage --help`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console

from forage_common.errors import ForageError


def run_command(app: Callable[..., None], name: str) -> None:
    """Run a typer application as `name` and exit: a typed error is one sentence, with code 2 if it is a UserError."""
    try:
        app(prog_name=name)
    except ForageError as error:
        Console(stderr=True, soft_wrap=True).print(f"forage: {error}", style="red", markup=False, highlight=False)
        sys.exit(error.exit_code)
