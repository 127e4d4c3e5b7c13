"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from forage_common.settings import Settings

Config = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file of settings.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings, e.g. trainer.total_training_steps=50 ('forage config show' lists all).",
        show_default=False,
    ),
]
BasePort = Annotated[
    int | None, typer.Option(help="Move all ports to this one and those after it.", show_default=False)
]


def load_run_settings(config: Path | None, overrides: list[str] | None, base_port: int | None, run: str) -> Settings:
    """The settings of a verb that works with services: those of the demo, where no file is given, and a run's id."""
    from forage_cli.local import demo as local
    from forage_cli.local.stack import repository, shift_ports
    from forage_common.settings import load_settings

    shifted = shift_ports(base_port) if base_port else []
    return load_settings(config or repository() / local.CONFIG, [*shifted, f"run.id={run}", *(overrides or [])])
