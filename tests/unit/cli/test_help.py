"""The help of every command, as a terminal shows it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import typer
from typer.testing import CliRunner

from forage_cli.main import app


def list_commands(group: typer.Typer, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for command in group.registered_commands:
        if (command.context_settings or {}).get("ignore_unknown_options"):
            continue  # a service's own command, which takes the place of this process
        yield (*path, command.name or getattr(command.callback, "__name__", "").replace("_", "-"))
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from list_commands(inner.typer_instance, (*path, str(inner.name)))


@pytest.mark.parametrize("path", list(list_commands(app)), ids=" ".join)
def test_a_command_prints_its_help(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*path, "--help"])
    assert shown.exit_code == 0, shown.exception
    assert "Usage" in shown.output
