"""`forage reward`: list the rewards, explain one score, score a dump. Runs in this service's own environment."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Annotated, TextIO

import typer
import yaml
from pydantic_core import PydanticUndefined
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from forage_reward.command.dumps import DumpRow, RowError, parse_row, split_raw_text
from forage_reward.command.score_file import ANY, MALFORMED, Summary, score_lines
from forage_reward.explanation import render_explanation
from forage_reward.isolation.user_rewards import UserRewards
from forage_reward.registry import REWARDS
from forage_reward.router import RewardRouter
from forage_reward.trajectory import GroundTruth, TrajectoryView
from forage_reward.wire import build_item, from_proto
from forage_runtime.command import run_command
from forage_runtime.errors import DataError, SettingsError
from forage_runtime.files.parquet_rows import stream_parquet_rows
from forage_runtime.settings import RewardRoute, Settings, load_settings
from forage_runtime.settings.reward import make_route
from forage_runtime.telemetry.logs import configure_logs
from forage_runtime.text.console import TextConsole
from forage_runtime.text.yaml_core import CoreLoader

_MAX_SHOWN = 5

Reward = Annotated[
    str, typer.Option("--reward", "-r", help="One reward for every row, instead of the settings' routes.")
]
Params = Annotated[list[str] | None, typer.Option("--param", "-p", help="Parameter of --reward, e.g. -p score=2.")]
Config = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file of settings.", show_default=False)]
Source = Annotated[str, typer.Option("--data-source", help="Data source of rows that name none.")]

app = typer.Typer(
    help="List the rewards, explain one score, or score a whole dump.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.command("list")
def list_rewards() -> None:
    """List every built-in reward with its parameters and their defaults."""
    table = Table("reward", "scores", "parameters")
    for name, reward in REWARDS.items():
        defaults = []
        for parameter, field in reward.params.model_fields.items():
            default = "…" if field.default is PydanticUndefined else str(field.default)
            defaults.append(f"{parameter}={default if len(default) <= 30 else '…'}")
        table.add_row(name, reward.summary, "\n".join(defaults))
    TextConsole().print(table, markup=False)


@app.command()
def explain(
    file: Annotated[str, typer.Argument(help="A raw text, or rows as of 'score'; - = stdin.")] = "-",
    line: Annotated[int, typer.Option(min=1, help="Row of the file to explain.")] = 1,
    target: Annotated[list[str] | None, typer.Option("--target", "-t", help="Accepted answers of a raw text.")] = None,
    reward: Reward = "",
    param: Params = None,
    config: Config = None,
    data_source: Source = "",
) -> None:
    """Print the format's path through one text, the rule that applied, and the contribution of every component."""
    with _open_lines(file) as lines:
        text = "".join(lines)
    row = _parse_one_row(_choose_row(text, line), target or [])
    source = row.data_source or data_source
    if not reward and not config and not source:
        reward = "search_r1_format"
    with _open_router(reward, param or [], config) as (router, _):
        item = build_item(row.view, row.truth)
        item.data_source = ANY if reward else source
        score = from_proto(router.score(item).score)
    console = TextConsole()
    for part in render_explanation(row.view, row.truth, score):
        console.print(part, markup=False, highlight=False)


@app.command()
def score(
    file: Annotated[str, typer.Argument(help="JSONL or Parquet, also of a run; - = JSONL from stdin.")],
    reward: Reward = "",
    param: Params = None,
    config: Config = None,
    data_source: Source = "",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="JSONL to write. Default: next to the file, .scores.", show_default=False),
    ] = None,
) -> None:
    """Score every row of a file that Forage wrote, or of a dump: spans or raw text, with targets or ground_truth.

    Exit code 1: some are malformed.
    """
    # Not .jsonl: each of these in the folder validation of a run is a validation.
    out = output or (Path("scores.jsonl") if file == "-" else Path(file).with_suffix(".scores"))
    if file != "-" and out.resolve() == Path(file).resolve():
        raise DataError(f"{out} is the file that is scored: name another one with --output")
    partial = out.with_name(out.name + ".part")
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with (
        _open_router(reward, param or [], config) as (router, routes),
        _open_lines(file) as lines,
        _open_output(partial) as stream,
        Progress(*columns, console=TextConsole(stderr=True)) as progress,
    ):
        if not reward and data_source and data_source not in routes:
            raise SettingsError(f"data source '{data_source}' has no route: known are {', '.join(sorted(routes))}")
        has_size = file != "-" and not file.endswith(".parquet")
        task = progress.add_task("scoring", total=Path(file).stat().st_size if has_size else None)
        summary = score_lines(
            lines,
            router,
            lambda source: ANY if reward else source or data_source,
            stream,
            lambda size: progress.advance(task, size),
        )
    partial.replace(out)
    _print_summary(summary, out)
    if summary.malformed:
        raise typer.Exit(1)


def main() -> None:
    """Run `python -m forage_reward.command`; a user's error is one sentence and exit code 2."""
    configure_logs("reward", "WARNING")
    run_command(app, "forage reward")


@contextlib.contextmanager
def _open_router(
    reward: str, params: list[str], config: Path | None
) -> Iterator[tuple[RewardRouter, dict[str, RewardRoute]]]:
    settings: Settings = load_settings(config)
    if params and not reward:
        raise SettingsError("--param belongs to --reward: give both, or set parameters in the settings' routes")
    parameters = {}
    for param in params:
        name, equals, value = param.partition("=")
        if not equals:
            raise SettingsError(f"--param {param} is not name=value")
        parameters[name] = yaml.load(value, CoreLoader)
    user = UserRewards(settings.reward.user, REWARDS, settings.security.user_code)
    try:
        known = {**REWARDS, **user.rewards}
        if reward and reward not in known:
            raise SettingsError(f"there is no reward '{reward}': --reward takes {', '.join(known)}")
        if reward:
            routes = {ANY: make_route(reward, parameters)}
            yield RewardRouter(routes, user.rewards, "--reward"), routes
        else:
            yield RewardRouter(settings.reward.routes, user.rewards), dict(settings.reward.routes)
    finally:
        user.close()


@contextlib.contextmanager
def _open_lines(file: str) -> Iterator[Iterator[str]]:
    """Open the lines of a file. Bytes that are not UTF-8 become U+FFFD; a byte order mark is none of the text."""
    if file == "-":
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="replace", newline="\n")  # type: ignore[union-attr]
        yield iter(sys.stdin)
    elif file.endswith(".parquet"):
        with contextlib.closing(stream_parquet_rows(Path(file), "use `forage reward score`")) as rows:
            yield (row.decode() for row in rows)
    else:
        try:
            stream = open(file, encoding="utf-8-sig", errors="replace", newline="\n")  # noqa: SIM115 - closed below
        except OSError as error:
            reason = f"{file} cannot be read ({error.strerror})"
            raise DataError(f"{reason}: give an existing file, or - for stdin") from None
        with stream:
            yield iter(stream)


def _choose_row(text: str, line: int) -> str:
    """Choose a row of a file of several; a text that is one row, or none, stays whole."""
    rows = [row for row in text.split("\n") if row.strip()]
    if len(rows) < 2 or not all(row.lstrip().startswith("{") for row in rows[:2]):
        rows = [text]
    if line > len(rows):
        raise DataError(f"it has {len(rows)} row{'s' * (len(rows) > 1)}: --line {line} is none of them")
    return rows[line - 1]


@contextlib.contextmanager
def _open_output(path: Path) -> Iterator[TextIO]:
    try:
        stream = open(path, "w", encoding="utf-8")  # noqa: SIM115 - so that only opening it is the user's error
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror}): give another --output") from None
    try:
        with stream:
            yield stream
    except BaseException:
        path.unlink()
        raise


def _parse_one_row(text: str, targets: list[str]) -> DumpRow:
    try:
        return parse_row(text)
    except RowError as error:
        if text.lstrip().startswith("{"):
            raise DataError(f"this row cannot be scored: {error}") from None
    if not targets:
        raise DataError("a raw text needs accepted answers: give --target, or a row of JSON with targets")
    return DumpRow(TrajectoryView(split_raw_text(text)), GroundTruth(tuple(targets)), "")


def _print_summary(summary: Summary, out: Path) -> None:
    console = TextConsole()
    table = Table("data source", "rows", "mean score", "mean validation", "statuses", title="scores")
    for name, source in sorted(summary.sources.items()):
        statuses = ", ".join(f"{status} {count}" for status, count in sorted(source.statuses.items()))
        means = [f"{fmean(values):.4f}" if values else "–" for values in (source.scores, source.validations)]
        table.add_row(name or "–", str(source.rows), *means, statuses)
    if summary.malformed:
        table.add_row("–", str(len(summary.malformed)), "–", "–", MALFORMED)
    console.print(table, markup=False)
    for line, reason in summary.malformed[:_MAX_SHOWN]:
        console.print(f"line {line}: {reason}", markup=False, highlight=False, soft_wrap=True)
    if len(summary.malformed) > _MAX_SHOWN:
        console.print(f"… and {len(summary.malformed) - _MAX_SHOWN} more; each is listed in the output", markup=False)
    console.print(f"{summary.rows} rows in, {summary.rows} out: {out}", markup=False, highlight=False, soft_wrap=True)
