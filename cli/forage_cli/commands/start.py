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
    from forage_cli.local.home import load_recipe
    from forage_cli.local.processes import interrupt_on_signals
    from forage_cli.local.run_watch import Watch
    from forage_cli.local.serving import prepare_stack, start_stack
    from forage_cli.local.stack import SERVING, TRAINING, Program, shift_ports
    from forage_cli.local.training.run import POLL_INTERVAL_S

    output = TextConsole()
    settings = load_recipe(config, [*shift_ports(base_port), *(overrides or [])])
    stack = prepare_stack(settings, TRAINING if train else SERVING, output, console)
    with interrupt_on_signals():
        try:
            start_stack(stack, output, None if train else stack.settings.model.path)
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

      forage console /mnt/experiments --address 127.0.0.1:18700

      forage console s3://bucket/runs

      forage console --address 0.0.0.0:18650 --token-file token
    """
    from forage_cli.local.console import serve_console
    from forage_cli.local.home import load_recipe

    overrides, page = [], ""
    if runs:
        runs, page = find_runs(runs)
        overrides.append(f"console.runs={json.dumps(runs)}")
    if address:
        overrides.append(f"console.http_address={json.dumps(address)}")
    if token_file is not None:
        overrides.append(f"console.auth_token_file={json.dumps(str(token_file))}")
    settings = load_recipe(config, overrides)
    raise typer.Exit(serve_console(settings, TextConsole(soft_wrap=True, highlight=False), page))


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
