"""`forage ask`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from forage_common.cli.options import BasePort, Config


def ask(
    question: Annotated[str, typer.Argument(help='For instance "What is the capital of Mongolia?"')],
    model: Annotated[
        Path | None, typer.Option(help="Policy folder, where services must be started.", show_default=False)
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = greedy.")] = 0.0,
    config: Config = None,
    base_port: BasePort = None,
) -> None:
    """Ask a policy one question and see the whole trajectory: thoughts, searches, passages, answer.

    Uses the services that are running ('forage up', or a demo in progress); without them starts what it needs, with
    the policy of the latest run where there is one, and ends it afterwards.
    """
    from forage_common.local import demo as local
    from forage_common.local import preflight, serving, show
    from forage_common.local.stack import SERVING, Stack, repository, shift_ports
    from forage_common.settings import load
    from forage_common.v1.trajectory_pb2 import Status

    console = Console()
    file = config or repository() / local.CONFIG
    settings = load(file, [*(shift_ports(base_port) if base_port else []), "run.id=ask"])
    if serving.is_running(settings):
        with console.status("asking …") as spinner:
            serving.wait_for_rollout(settings, spinner)
        trajectory = serving.ask(settings, question, temperature)
    else:
        policy = model or latest_policy(settings.run.dir) or settings.model.path
        console.print(
            f"no services are running: starting them with the policy {policy} (about a minute)",
            highlight=False,
        )
        local.prepare_world(settings, console)
        settings = settings.model_copy(update={"model": settings.model.model_copy(update={"path": policy})})
        preflight.check(settings, SERVING)
        stack = Stack(settings, SERVING)
        with local.ended_by_signals():
            try:
                stack.start()
                serving.publish(settings, policy)
                with console.status("starting …") as spinner:
                    serving.wait_until_ready(stack, spinner)
                trajectory = serving.ask(settings, question, temperature)
            finally:
                stack.stop()
    console.print(show.panel(show.as_row(trajectory, question), judged=False))
    if trajectory.status != Status.STATUS_OK:
        console.print(f"[yellow]{Status.Name(trajectory.status)}[/]: {trajectory.status_detail}", highlight=False)


def latest_policy(runs: Path) -> Path | None:
    """The newest policy folder that the latest run published."""
    found = list((runs / "latest" / "policies").glob("v*"))
    complete = [folder for folder in found if (folder / "model.safetensors").is_file()]
    return max(complete, key=lambda folder: folder.stat().st_mtime, default=None)
