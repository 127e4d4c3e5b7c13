"""`forage worker`: its arguments. Runs in the environment of the rollout service, or in one of your own."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Annotated

import typer

from forage_rollout.command.worker import Worker
from forage_runtime.addresses import reach_address
from forage_runtime.command import run_command
from forage_runtime.errors import SettingsError
from forage_runtime.security.tls import http_scheme, make_client_context
from forage_runtime.security.token_file import open_token_file
from forage_runtime.settings import load_settings
from forage_runtime.telemetry.logs import configure_logs
from forage_runtime.user_code import load_object

FUNCTION = "run"
_Config = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file of settings.", show_default=False)]

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def work(
    agent: Annotated[str, typer.Argument(help="FILE.py with 'async def run(task, client)', or FILE.py:FUNCTION.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[SETTINGS]...", help="Such as rollout.n=4.")] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Sessions at once.")] = 16,
    config: _Config = None,
) -> None:
    """Run an agent of your own in the sessions of a rollout service, until Ctrl-C.

    The function is called once for each sample of a data source whose environment is external. It talks to the policy
    with any OpenAI client, and returns a reward, or None: then the reward service gives it.

    Example:

      forage worker my_agent.py -c my.yaml
    """
    settings = load_settings(config, overrides or ())
    source = agent if ":" in agent else f"{agent}:{FUNCTION}"
    run = load_object(source)
    if not inspect.iscoroutinefunction(run):
        raise SettingsError(f"'{source}' is {run!r}: expected 'async def {FUNCTION}(task, client)'")
    configure_logs("worker")
    url = f"{http_scheme(settings.tls)}://{reach_address(settings.rollout.http_address)}"
    tokens = open_token_file(settings.rollout.auth_token_file, "rollout.auth_token_file")
    try:
        asyncio.run(Worker(run, url, tokens, make_client_context(settings.tls)).work(parallel))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def main() -> None:
    """Run the command; a user's error is one sentence and exit code 2."""
    run_command(app, "forage worker")
