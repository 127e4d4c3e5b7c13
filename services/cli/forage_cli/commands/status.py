"""`forage status`."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from forage_cli.commands.options import BasePort, Config
from forage_cli.terminal.tables import make_table


def status(config: Config = None, base_port: BasePort = None) -> None:
    """Show which services run, what they wait for, the served policy and the queues. Exit code 1: one is not ready."""
    from forage_cli.local.stack import Program, list_health_urls, probe_readiness, shift_ports
    from forage_common.errors import UnavailableError
    from forage_common.settings import load_settings
    from forage_common.streams.client import StreamClient

    console = Console()
    settings = load_settings(find_latest_settings(config), shift_ports(base_port))
    table = make_table("service", "state", "address", left=3)
    waits = {program: probe_readiness(url) for program, url in list_health_urls(settings).items()}
    lines = []
    try:
        client = StreamClient(settings.redis, settings.run.id, patience_s=2)
        client.ping()
        waits = {Program.REDIS: "", **waits}
        policy = client.read_policy()
        if policy is not None:
            lines.append(f"policy v{policy.version} (epoch {policy.epoch}) {policy.uri}")
            lines += [f"  {name} serves v{p.version} (epoch {p.epoch})" for name, p in client.read_replicas().items()]
        lines.append(
            f"prompts queued {client.count_backlog(client.prompts)}, "
            f"groups queued {client.count_backlog(client.trajectories)}"
        )
    except UnavailableError:
        waits = {Program.REDIS: "starting", **waits}
    urls = {Program.REDIS: settings.redis.url, **list_health_urls(settings)}
    for program, wait in waits.items():
        state = "[green]ready[/]" if not wait else f"[yellow]{'not running' if wait == 'starting' else wait}[/]"
        table.add_row(program, state, urls[program])
    console.print(table)
    for line in lines:
        console.print(line, highlight=False)
    needed = [wait for program, wait in waits.items() if program is not Program.TRAINER]
    raise typer.Exit(1 if any(needed) else 0)


def find_latest_settings(config: Path | None) -> Path | None:
    """Return the given file, else the settings of the latest run, else None."""
    latest = Path("runs/latest/settings.yaml")
    return config or (latest if latest.is_file() else None)
