"""`forage status`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from forage_cli.commands.options import BasePort, Config
from forage_cli.terminal.tables import make_table
from forage_runtime.text.console import TextConsole
from forage_runtime.text.redaction import redact_url


def status(
    config: Config = None,
    base_port: BasePort = None,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Also print the Python stacks of the run's processes on this machine.")
    ] = False,
) -> None:
    """Show which services run, what each waits for and until when, the served policy and the queues.

    Takes twenty seconds at most: a stopped process is named, and so is a service that is silent for fifteen. One that
    answers after more than two is slow. Exit code 1: a service is not ready, or a process is stopped or silent.
    """
    from forage_cli.local.family import fetch_stacks
    from forage_cli.local.home import load_recipe
    from forage_cli.local.inspection import inspect_run, open_streams
    from forage_cli.local.stack import STACKS, Program, shift_ports
    from forage_runtime.clients.health import describe_replica, list_health_urls
    from forage_runtime.errors import SettingsError, UnavailableError

    console = TextConsole()
    settings = load_recipe(find_settings(config, base_port), shift_ports(base_port))
    lines: list[str] = []

    def read_streams() -> None:
        try:
            client = open_streams(settings)
            policy = client.read_policy()
            replicas = client.read_replicas() if policy is not None else {}
            prompts, groups = client.count_backlog(client.prompts), client.count_backlog(client.trajectories)
        except (UnavailableError, SettingsError):  # the table says so
            return
        if policy is not None:
            lines.append(f"policy v{policy.version} (epoch {policy.epoch}) {redact_url(policy.uri)}")
            lines.extend(f"  {name} {describe_replica(replica)}" for name, replica in replicas.items())
        lines.append(f"prompts queued {prompts}, groups queued {groups}")

    found = inspect_run(settings, [read_streams])
    urls = {"redis": redact_url(settings.redis.url), **list_health_urls(settings)}
    table = make_table("service", "state", "process", "address", left=4)
    for program, one in found.items():
        main = next((process for process in one.processes if process.is_main), None)
        state = Text(one.state, style="green" if one.state in ("ready", "done") and not one.stopped else "yellow")
        pid = f"{main.pid}{' stopped' if main.is_stopped else ''}" if main is not None else ""
        table.add_row(program, state, pid, urls[program])
    console.print(table)
    for program, one in found.items():
        for line in one.list_lines():
            console.print(f"{program}: {line}", highlight=False, soft_wrap=True)
    for line in list(lines):
        console.print(line, highlight=False, soft_wrap=True)
    if stacks:
        processes = [process for one in found.values() for process in one.processes]
        texts = fetch_stacks(processes, settings.run.folder.absolute() / STACKS)
        for process in processes:
            console.rule(f"{process.service}: {process}", align="left")
            console.print(texts[process.pid], highlight=False, soft_wrap=True)
        if not processes:
            console.print("no process of this run was started on this machine by 'forage up' or 'forage demo'")
    del found[Program.CONSOLE]  # no run needs it
    silent = any(one.stopped or one.state == "silent" for one in found.values())
    waiting = any(not one.is_ready for program, one in found.items() if program is not Program.TRAINER)
    raise typer.Exit(1 if silent or waiting else 0)


def find_settings(config: Path | None, base_port: int | None) -> Path | None:
    """Return the given file, else the settings of what runs here at these ports, else of the latest run, else None.

    Raises:
        UserError: several runs have services here.
    """
    from forage_cli.local.running import find_running

    if config is not None:
        return config
    latest = Path("runs/latest/settings.yaml")
    if stack := find_running(base_port):
        return stack.file
    return latest if latest.is_file() else None
