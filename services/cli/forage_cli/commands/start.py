"""`forage demo` and `forage up`: a whole stack on this machine."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console

from forage_cli.commands.options import BasePort, Config, Overrides


def demo(
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(help="Seed of data order and sampling.", min=0)] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the latest run.")] = False,
    config: Config = None,
    base_port: BasePort = None,
) -> None:
    """Train the tiny policy to search world facts on this machine, in five to ten minutes.

    Starts every service on loopback, shows the run live, validates before and after training on entities that training
    never saw, and writes a report to runs/latest. Ctrl-C stops all services; --resume continues.

    Examples:

      forage demo

      forage demo --seed 1 trainer.total_training_steps=50
    """
    from forage_cli.local import demo as local

    if resume:
        settings = local.load_resumed_settings(overrides or [])
    else:
        settings = local.load_demo_settings(seed, config, overrides or [], base_port)
    local.run_demo(settings, Console())


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
    from forage_cli.local.gpus import build_stack
    from forage_cli.local.stack import SERVING, Program, end_earlier_stack, shift_ports
    from forage_cli.local.watch import Watch
    from forage_common.settings import load_settings

    console = Console()
    settings = load_settings(config, [*shift_ports(base_port), *(overrides or [])])
    programs = tuple(Program) if train else SERVING
    local.prepare_world(settings, console)
    end_earlier_stack(settings)
    preflight.check_all(settings, programs)
    stack = build_stack(settings, programs, console)
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
