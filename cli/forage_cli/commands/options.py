"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from forage_runtime.settings import Settings

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="YAML file of settings, for instance configs/demo.yaml.", show_default=False),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SETTINGS]...",
        help="key=value, for instance trainer.total_training_steps=50; 'forage config explain' describes them.",
        show_default=False,
    ),
]
BasePort = Annotated[
    int | None,
    typer.Option(min=1, max=65_400, help="Use this port and those after it for all services.", show_default=False),
]
WithConsole = Annotated[
    bool, typer.Option("--console/--no-console", help="Serve the console, which shows the run in a browser.")
]


def load_run_settings(config: Path | None, overrides: list[str] | None, base_port: int | None, run: str) -> Settings:
    """Load the settings of a command that uses services: the demo's where no file is given, under the run id `run`."""
    from forage_cli.local.hardening import adopt_security
    from forage_cli.local.home import DEMO, find_home, load_recipe
    from forage_cli.local.stack import shift_ports
    from forage_runtime.settings import load_settings

    merged = [*shift_ports(base_port), f"run.id={run}", *(overrides or [])]
    settings = load_recipe(config or find_home() / DEMO, merged)
    latest = settings.run.dir / "latest/settings.yaml"
    if config or not latest.is_file():
        return settings
    return adopt_security(settings, load_settings(latest, (), {}), latest.parent)
