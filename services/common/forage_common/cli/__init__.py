"""The `forage` command."""

from forage_common.cli.main import main

__all__ = ["main"]
