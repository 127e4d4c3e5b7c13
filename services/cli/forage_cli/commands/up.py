"""`forage up`."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console

from forage_cli.commands.options import BasePort, Config, Overrides


def up(
    overrides: Overrides = None,
    train: Annotated[
        bool, typer.Option("--train", help="Also start the trainer; without it model.path is served.")
    ] = False,
    config: Config = None,
    base_port: BasePort = None,
) -> None:
    """Start the services on this machine and keep them running until Ctrl-C.

    Examples:

      forage up

      forage up --train --config configs/demo.yaml
    """
    from forage_cli.local import demo as local
    from forage_cli.local import preflight, serving
    from forage_cli.local.stack import SERVING, Program, Stack, end_earlier_stack, shift_ports
    from forage_cli.local.watch import Watch
    from forage_common.settings import load_settings

    console = Console()
    settings = load_settings(config, [*shift_ports(base_port), *(overrides or [])])
    programs = tuple(Program) if train else SERVING
    local.prepare_world(settings, console)
    end_earlier_stack(settings)
    preflight.check_all(settings, programs)
    stack = Stack(settings, programs)
    with local.interrupt_on_signals():
        try:
            stack.start()
            if not train and not settings.rollout.engine.endpoint:
                serving.publish(settings, settings.model.path)
            with console.status("starting …") as spinner:
                serving.wait_until_ready(stack, spinner)
            console.print(
                f"ready: [bold]forage ask[/], [bold]forage status[/]; logs in {stack.folder / 'logs'}; Ctrl-C stops"
            )
            with Watch(stack) as watch:
                while not (train and stack.supervisor.is_done(Program.TRAINER)):
                    watch.tick(lambda sentence: console.print(sentence, highlight=False, soft_wrap=True))
                    time.sleep(local.POLL_INTERVAL_S)  # wait: pause between two looks
        except KeyboardInterrupt:
            console.print("stopping …")
        finally:
            stack.stop()
