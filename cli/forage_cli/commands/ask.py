"""`forage ask`."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from forage_cli.commands.options import BasePort, Config, load_run_settings
from forage_runtime.text.console import TextConsole
from forage_runtime.text.enums import name_value

if TYPE_CHECKING:
    from forage_proto.v1.trajectory_pb2 import Prompt
    from forage_runtime.settings import Settings


def ask(
    question: Annotated[str, typer.Argument(help='For instance "What is the capital of Mongolia?"')],
    model: Annotated[Path | None, typer.Option(help="Model folder to start services for.", show_default=False)] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = greedy.")] = 0.0,
    environment: Annotated[
        str, typer.Option(help="A built-in environment; single_turn answers without searches.", show_default=False)
    ] = "",
    config: Config = None,
    base_port: BasePort = None,
) -> None:
    """Ask a policy one question and print the trajectory: thoughts, searches, passages, answer.

    Uses running services (of 'forage up' or of a demo in progress). Otherwise it starts the services with the policy of
    the latest run, and stops them afterwards. Exit code 1: the trajectory failed.

    Example:

      forage ask "What is the capital of Mongolia?"
    """
    from forage_cli.local import serving
    from forage_records.sampling import build_ask_prompt, check_question
    from forage_weights.folders import find_newest

    check_question(question)  # before services are started for it
    console = TextConsole()
    settings = load_run_settings(config, None, base_port, "ask")
    newest = find_newest(settings.run.dir / "latest")
    with serving.ensure_services(settings, console, model=model, default=newest) as settings:
        prompt = build_ask_prompt(settings, question, temperature, environment)
        succeeded = asyncio.run(_print_events(settings, prompt, question, console))
    raise typer.Exit(0 if succeeded else 1)


async def _print_events(settings: Settings, prompt: Prompt, question: str, console: Console) -> bool:
    """Print turns and observations as they arrive; returns whether the trajectory succeeded."""
    from forage_cli.terminal import trajectories as show
    from forage_proto.v1.trajectory_pb2 import Status
    from forage_runtime.clients.rollout import RolloutClient

    succeeded = False
    console.print(question, style="bold magenta", highlight=False)
    with console.status("generating …"):
        async with RolloutClient(settings) as rollout, aclosing(rollout.stream(prompt)) as events:
            async for event in events:
                if event.WhichOneof("event") != "group":
                    console.print(show.render_event(event))
                    continue
                failed = [t for t in event.group.trajectories if t.status != Status.STATUS_OK]
                succeeded = not failed
                for trajectory in failed:
                    reason = f"{name_value(Status, trajectory.status, whole=True)}: {trajectory.status_detail}"
                    console.print(reason, style="yellow", highlight=False)
    return succeeded
