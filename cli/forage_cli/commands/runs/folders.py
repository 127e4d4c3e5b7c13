"""`forage runs list|show|diff|rm`."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forage_cli.terminal.tables import make_table
from forage_runtime.errors import DataError, UserError
from forage_runtime.text.console import TextConsole
from forage_runtime.text.terminal import echo

if TYPE_CHECKING:
    from forage_records.run_folder import RunFolder


def complete_runs(incomplete: str) -> list[str]:
    """The ids that a shell may complete."""
    from forage_cli.runs.catalog import LATEST, list_folders

    names = [LATEST, *(folder.name for folder in list_folders(find_runs_folder(None)))]
    return [name for name in names if name.startswith(incomplete)]


Runs = Annotated[
    Path | None,
    typer.Option("--runs", help="Folder with the folders of runs; run.dir of the settings.", show_default=False),
]
RunName = Annotated[str, typer.Argument(help="Id of a run, 'latest', or its folder.", autocompletion=complete_runs)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def list_runs(runs: Runs = None, as_json: Json = False) -> None:
    """List the runs, the newest last: how far each came, and what it reached.

    A run is active while a command on this machine runs its services.

    Example:

      forage runs list
    """
    from forage_cli.runs.catalog import list_folders, read_state
    from forage_records.run_folder import RunFolder

    folder = find_runs_folder(runs)
    states, damaged = [], []
    for one in list_folders(folder):
        try:
            states.append(read_state(RunFolder(one)))
        except DataError as error:
            damaged.append(str(error))
    for problem in damaged:
        echo(problem, err=True)
    if as_json:
        typer.echo(json.dumps([{**state.to_json(), "active": is_active(state.folder)} for state in states]))
        return
    console = TextConsole(soft_wrap=True, highlight=False)
    if not states and not damaged:
        console.print(f"no runs in {folder}: start one with 'forage demo' or 'forage train -c FILE'")
        return
    table = make_table("run", "state", "steps", "EM before", "EM after", "last report", left=2)
    for state in states:
        table.add_row(
            state.id,
            describe_phase(state.folder, state.phase),
            f"{state.steps}/{state.total_steps or '?'}",
            show_value(state.em_before),
            show_value(state.em_after),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(state.changed)),
        )
    console.print(table)


def show(run: RunName = "latest", runs: Runs = None, as_json: Json = False) -> None:
    """Show a run: how far it came, its final metrics, and its settings that are not the defaults.

    Example:

      forage runs show latest
    """
    from forage_cli.runs.catalog import find_changed_settings, find_run, read_metrics, read_state

    found = find_run(find_runs_folder(runs), run)
    state, metrics, changed = read_state(found), read_metrics(found), find_changed_settings(found)
    if as_json:
        whole = {**state.to_json(), "active": is_active(found.path), "metrics": metrics, "settings": changed}
        typer.echo(json.dumps(whole))
        return
    console = TextConsole(soft_wrap=True, highlight=False)
    console.print(
        f"{state.id}  {describe_phase(found.path, state.phase)}, {state.steps}/{state.total_steps or '?'} steps"
    )
    console.print(f"folder  {found.path}")
    for name, file in (("report", "report.html"), ("logs", "logs")):
        if (found.path / file).exists():
            console.print(f"{name:<6}  {found.path / file}")
    _print_rows(console, "metric", {name: (value,) for name, value in metrics.items()}, "value")
    _print_rows(console, "setting", {name: (value,) for name, value in changed.items()}, "value")


def diff(
    first: RunName,
    second: RunName,
    runs: Runs = None,
    as_json: Json = False,
) -> None:
    """Show in which settings two runs differ, and the final metrics of both.

    'forage compare-runs' compares the tokens and weights of each step.

    Example:

      forage runs diff first second
    """
    from forage_cli.runs.catalog import compare_settings, find_run, read_metrics

    folder = find_runs_folder(runs)
    one, other = find_run(folder, first), find_run(folder, second)
    settings, ones, others = compare_settings(one, other), read_metrics(one), read_metrics(other)
    metrics = {name: (ones.get(name), others.get(name)) for name in {**ones, **others}}
    if as_json:
        typer.echo(json.dumps({"runs": [one.path.name, other.path.name], "settings": settings, "metrics": metrics}))
        return
    console = TextConsole(soft_wrap=True, highlight=False)
    names = one.path.name, other.path.name
    if settings:
        _print_rows(console, "setting", settings, *names)
    else:
        console.print("the settings are equal")
    _print_rows(console, "metric", metrics, *names)


def remove(
    names: Annotated[list[str], typer.Argument(metavar="RUN", help="Ids of runs.", autocompletion=complete_runs)],
    runs: Runs = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove the folders of runs: metrics, trajectories, checkpoints and logs. Asks before.

    A run that a command on this machine is running is refused. What lies elsewhere stays: uploaded checkpoints, data in
    a Redis of your own.

    Example:

      forage runs rm demo-20260101-120000-seed0 --yes
    """
    from forage_cli.runs.catalog import LATEST, find_own_run

    folder = find_runs_folder(runs)
    found = list({run.path: run for run in (find_own_run(folder, name) for name in names)}.values())
    for run in found:
        check_removable(run)
    if not yes:
        for run in found:
            echo(f"{run.path}  {len(run.read_steps())} steps, {measure_mib(run.path):.0f} MiB")
        if not typer.confirm(f"Remove {'this run' if len(found) == 1 else f'these {len(found)} runs'}?"):
            raise typer.Exit(1)
    for run in found:
        check_removable(run)  # it may have been resumed while the question stood
        link = run.path.parent / LATEST
        if link.is_symlink() and link.resolve() == run.path:
            link.unlink()
        shutil.rmtree(run.path)
        echo(f"removed {run.path}")


def check_removable(run: RunFolder) -> None:
    """Check that nothing on this machine runs a run, as far as its record says.

    Raises:
        UserError: a command does, or services that it left behind.
    """
    from forage_cli.local.family import list_processes
    from forage_cli.local.processes import find_supervisor, is_damaged
    from forage_cli.local.stack import RECORD

    if is_damaged(run.path / RECORD):
        raise UserError(
            f"{run.path / RECORD}, which names the run's processes, is damaged: make sure that none of them runs (ps),"
            " and remove that file first"
        )
    supervisor = find_supervisor(run.path / RECORD)
    alive = [process.pid for processes in list_processes(run.path / RECORD).values() for process in processes]
    if supervisor is not None:
        raise UserError(
            f"the run {run.path.name} is in use by process {supervisor.pid}: stop it first, by Ctrl-C or kill"
        )
    if alive:
        raise UserError(
            f"the run {run.path.name} is in use by services that a killed command left behind"
            f" ({', '.join(map(str, alive))}): end them first with kill"
        )


def is_active(folder: Path) -> bool:
    """Whether a command on this machine runs the services of a run."""
    from forage_cli.local.processes import find_supervisor
    from forage_cli.local.stack import RECORD

    return find_supervisor(folder / RECORD) is not None


def describe_phase(folder: Path, phase: str) -> str:
    """What a run does, or how it was left: the phase of its trainer says nothing about one that was stopped."""
    if is_active(folder):
        return f"active: {phase or 'starting'}"
    return "done" if phase == "done" else "stopped"


def find_runs_folder(given: Path | None) -> Path:
    """The folder with the folders of runs: the given one, or that of the settings.

    Raises:
        UserError: the given one does not exist.
    """
    from forage_runtime.settings import load_settings

    if given is not None and not given.is_dir():
        raise UserError(f"{given} is not a folder: give one with runs, such as runs/")
    return given or load_settings().run.dir


def measure_mib(folder: Path) -> float:
    """Measure the size of the files below a folder, in MiB."""
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20


def show_value(value: Any) -> str:
    """A value as a cell of a table: numbers with four digits, a dash for none."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def _print_rows(console: TextConsole, title: str, rows: dict[str, tuple[Any, ...]], *columns: str) -> None:
    if rows:
        table = make_table(title, *columns)
        for name, values in rows.items():
            table.add_row(name, *map(show_value, values))
        console.print()
        console.print(table)
