"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
