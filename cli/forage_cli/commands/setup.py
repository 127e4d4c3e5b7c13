"""`forage setup`."""

from __future__ import annotations

from typing import Annotated

import typer

from forage_runtime.text.console import TextConsole


def setup(
    services: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SERVICES]...", help="retriever, reward, rollout, trainer or console.", show_default="all"
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, gpu, or gpu-base (a system Python with torch and vLLM).", show_default="as before")
    ] = "",
) -> None:
    """Install the environments of the services from their locks; those that are current stay.

    A wheel's command installs an environment by itself when it needs it first. Everything is below FORAGE_HOME
    (~/.local/share/forage), in a checkout in .venvs.
    """
    from forage_cli.local.home import find_home, install
    from forage_cli.local.stack import Program

    wanted = services or [program for program in Program if program is not Program.REDIS]
    install(wanted, device)
    TextConsole().print(f"environments  {find_home() / '.venvs'}", highlight=False)
