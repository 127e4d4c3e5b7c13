"""`forage up`: a whole stack on this machine; `forage console` alone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from forage_cli.commands.options import BasePort, Config, Overrides, WithConsole
from forage_runtime.text.console import TextConsole


def up(
    overrides: Overrides = None,
    train: Annotated[
        bool, typer.Option("--train", help="Also start the trainer; without it model.path is served.")
    ] = False,
    console: WithConsole = True,
    config: Config = None,
    base_port: BasePort = None,
) -> None:
    """Start the services on this machine and keep them running until Ctrl-C.

    Examples:

      forage up

      forage up --train --config configs/demo.yaml
    """
    from forage_cli.local import preflight, serving
    from forage_cli.local.console import add_console
    from forage_cli.local.gpus import build_stack
    from forage_cli.local.hardening import harden
    from forage_cli.local.processes import interrupt_on_signals
    from forage_cli.local.run_watch import Watch
    from forage_cli.local.stack import SERVING, TRAINING, Program, end_earlier_stack, shift_ports
    from forage_cli.local.training.run import POLL_INTERVAL_S, prepare_world
    from forage_runtime.settings import load_settings

    output = TextConsole()
    settings = load_settings(config, [*shift_ports(base_port), *(overrides or [])])
    programs: tuple[Program, ...] = TRAINING if train else SERVING
    prepare_world(settings, output)
    end_earlier_stack(settings)
    preflight.check_all(settings, programs)
    settings = harden(settings)
    if console:
        programs = add_console(settings, programs, output)
    stack = build_stack(settings, programs, output)
    settings = stack.settings
    with interrupt_on_signals():
        try:
            stack.start()
            if not train and not settings.rollout.engine.endpoint:
                stack.wait_for_redis()
                serving.publish(settings, settings.model.path)
            with output.status("starting …") as spinner:
                serving.wait_until_ready(stack, spinner)
            output.print("ready: [bold]forage ask[/], [bold]forage status[/]; logs in ", end="", markup=True)
            output.print(f"{stack.folder / 'logs'}; Ctrl-C stops")
            with Watch(stack) as watch:
                while not (train and stack.supervisor.is_done(Program.TRAINER)):
                    watch.tick(lambda sentence: output.print(sentence, highlight=False, soft_wrap=True))
                    time.sleep(POLL_INTERVAL_S)  # wait: pause between two looks
        except KeyboardInterrupt:
            output.print("stopping …")
        finally:
            stack.stop()


def console(
    runs: Annotated[
        str,
        typer.Argument(
            help="Folder with the folders of runs, or its address, such as s3://bucket/runs; or the folder of one run. "
            "Without it: run.dir of the settings."
        ),
    ] = "",
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port, in place of 18650.", show_default=False)
    ] = None,
    address: Annotated[
        str,
        typer.Option(help="host:port to listen on. Other machines need --token-file.", show_default=False),
    ] = "",
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token that browsers must give.", show_default=False)
    ] = None,
    config: Config = None,
) -> None:
    """Watch runs and read what the policy wrote, in a browser, until Ctrl-C.

    Shows finished runs and those that are going on: curves, steps, every trajectory token by token, questions over
    time, the health of the services. It changes nothing but notes and tags. 'forage demo' and 'forage up' serve it.

    Examples:

      forage console --open

      forage console /mnt/experiments --port 18700

      forage console s3://bucket/runs

      forage console --address 0.0.0.0:18650 --token-file token
    """
    from forage_cli.local.console import serve_console
    from forage_runtime.errors import UserError
    from forage_runtime.settings import load_settings

    if port and address:
        raise UserError("give one of --port and --address")
    overrides, page = [], ""
    if runs:
        runs, page = find_runs(runs)
        overrides.append(f"console.runs={json.dumps(runs)}")
    if address or port:
        overrides.append(f"console.http_address={json.dumps(address or f'127.0.0.1:{port}')}")
    if token_file is not None:
        overrides.append(f"console.auth_token_file={json.dumps(str(token_file))}")
    settings = load_settings(config, overrides)
    raise typer.Exit(serve_console(settings, TextConsole(soft_wrap=True, highlight=False), page, open_page))


def find_runs(given: str) -> tuple[str, str]:
    """The folder of runs, and the page to begin with: that of a run, where its folder was given.

    Raises:
        UserError: there is no such folder.
    """
    from forage_runtime.errors import UserError

    if "://" in given:
        return given, ""
    folder = Path(given).resolve()
    if not folder.is_dir():
        raise UserError(f"{given} is not a folder: give one with runs, such as runs/, or start one with 'forage demo'")
    if (folder / "settings.yaml").is_file():
        return str(folder.parent), f"/runs/{folder.name}"
    return str(folder), ""
