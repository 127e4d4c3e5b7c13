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


def load_run_settings(
    config: Path | None,
    overrides: list[str] | None,
    base_port: int | None,
    run: str,
    program: str | None = "rollout",
) -> Settings:
    """Load the settings of a command that uses services, under the run id `run`.

    Without a file they are those of the stack that runs here, and the demo's where none does.

    Args:
        program: the service that the command calls; None: one that it starts in any case.

    Raises:
        UserError: several stacks run, or services run that do not use what is asked for.
    """
    from forage_cli.local.home import DEMO, find_home, load_recipe
    from forage_cli.local.running import check_running, find_running, names_address
    from forage_cli.local.stack import Program, shift_ports
    from forage_runtime.settings import load_settings

    ports, given = shift_ports(base_port), overrides or []
    stack = None
    if config is None and not names_address(given):
        stack = find_running(base_port)
    if stack is not None:
        settings = load_settings(stack.file, [f"run.id={run}", *given])
    else:
        settings = load_recipe(config or find_home() / DEMO, [*ports, f"run.id={run}", *given])
    if program is not None:
        check_running(settings, given, Program(program), config is not None)
    return settings
