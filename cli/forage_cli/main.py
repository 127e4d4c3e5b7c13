"""The `forage` command. Heavy imports stay inside the commands, so that `forage --help` is quick."""

from __future__ import annotations

from typing import Annotated

import typer

from forage_cli.commands import (
    ask,
    config,
    data,
    doctor,
    eval,
    forwarded,
    model,
    plan,
    probe,
    redis_server,
    rollout,
    runs,
    security,
    start,
    status,
    train,
    trajectories,
)
from forage_runtime import __version__
from forage_runtime.command import run_command

app = typer.Typer(
    name="forage",
    help="Train LLM search agents with reinforcement learning, as services. Start with [bold]forage demo[/],"
    " then [bold]forage train -c FILE[/].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"forage {__version__}")
        raise typer.Exit


@app.callback()
def _define_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of `forage` itself; the callback of each does its work."""


app.command("demo")(train.demo)
app.command("train")(train.train)
app.command("up")(start.up)
app.command("ask")(ask.ask)
app.command("probe")(probe.probe)
app.command("trajectories")(trajectories.trajectories)
app.command("logs")(runs.logs)
app.command("check-history")(runs.check_history)
app.command("compare-runs")(runs.compare_runs)
app.command("console")(start.console)
app.command("status")(status.status)
app.command("doctor")(doctor.doctor)
app.command("setup")(doctor.setup)
app.command("plan")(plan.plan)
forwarded.add_forwarded(app)
app.add_typer(config.app, name="config")
app.add_typer(data.app, name="data")
app.add_typer(eval.app, name="eval")
app.add_typer(model.app, name="model")
app.add_typer(redis_server.app, name="redis")
app.add_typer(rollout.app, name="rollout")
app.add_typer(runs.app, name="runs")
app.add_typer(security.app, name="security")


def main() -> None:
    """Run the command; a user's error is one sentence and exit code 2."""
    run_command(app, "forage")
