"""`forage eval`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from typer.core import TyperGroup

from forage_cli.commands.options import BasePort, Config, settings_of
from forage_cli.evaluation.layouts import Layout
from forage_cli.terminal.progress import progress

if TYPE_CHECKING:
    from forage_cli.evaluation.methods import Method
    from forage_cli.evaluation.plan import Plan
    from forage_cli.evaluation.policies import EvaluatedPolicy
    from forage_common.files.questions import Question
    from forage_common.settings import Settings

UNTRAINED, NONE, EVERY = "untrained", "none", "all"
_READ = 3
_WIDEST = 400


class _Evaluates(TyperGroup):
    """A first word that is no command begins the arguments of `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *self.get_help_option_names(ctx)):
            args = ["run", *args]
        return list(super().parse_args(ctx, args))


app = typer.Typer(cls=_Evaluates, no_args_is_help=True, rich_markup_mode="rich")


@app.callback()
def _group() -> None:
    """Measure policies on files of questions, beside baselines; report and compare.

    [bold]forage eval data/world/test.parquet --policy runs/latest@latest --baselines all[/]
    the newest policy of the latest run, the one it was started from, and three ways to ask without searching

    [bold]forage eval test.parquet --policy before=models/a --policy after=models/b --samples 8[/]
    two policies under names, with pass@k and majority@k

    [bold]forage eval nq.parquet popqa.parquet --policy https://host/v1 --layout search-r1[/]
    a remote model, in the table of the paper

    [bold]forage eval compare runs/evaluations/x:before runs/evaluations/x:after[/]
    is one better, and on which questions?

    The questions come first; 'forage eval run --help' lists the options.
    """


@app.command()
def run(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="QUESTIONS... [SETTINGS]...",
            help="Parquet files in the Search-R1 layout, and settings such as rollout.max_turns=2.",
            show_default=False,
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="\\[NAME=]FOLDER, RUN@latest, RUN@best, RUN@<version>, http(s)://…/v1, or 'running'; repeat.",
            show_default="what runs, else model.path",
        ),
    ] = None,
    untrained: Annotated[
        Path | None, typer.Option(help="The policy before training.", show_default="the one that RUN began with")
    ] = None,
    baselines: Annotated[str, typer.Option(help="direct, cot, rag, untrained, joined by commas; all; none.")] = NONE,
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Of every question.")] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="0 = greedy.", show_default="0; with several samples the settings'"),
    ] = None,
    seed: Annotated[int, typer.Option(min=1, help="Of the first sample of the first question.")] = 1,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only so many questions of every file.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder to write, or to go on with.", show_default="runs/evaluations/NAME"),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew in a folder that holds other results.")] = False,
    layout: Annotated[
        Layout | None, typer.Option(help="Also print the table of this paper.", show_default=False)
    ] = None,
    config: Config = None,
    base_port: BasePort = None,
) -> None:
    """Evaluate policies on questions.

    Every policy answers every question as it stands (search), and as the baselines put it. Uses services that run
    ('running'), or starts them and brings them from policy to policy. Ctrl-C, and worse, keeps what was done; the same
    command goes on from there, and tries again what had failed.
    """
    from forage_cli.evaluation import engines, plan, tables
    from forage_common.errors import UserError
    from forage_common.files.model_folder import end_of_turn

    console = Console()
    files, overrides = _files_and_settings(arguments)
    methods, with_untrained = _baselines(baselines)
    policies = _policies(policy or [], untrained, with_untrained)
    settings = settings_of(config or _config_of(policies), overrides, base_port, "eval")
    policies = _known(policies, settings)
    made, settings = _plan(files, policies, methods, settings, samples, temperature, seed, limit)
    folder = out or settings.run.dir / "evaluations" / "-".join(
        [*(f"{file.absolute().parent.name}-{file.stem}" for file in files), *(policy.label for policy in policies)]
    )
    if fresh:
        _empty(folder)
    ends = {policy.label: end_of_turn(engines.tokenizer_folder(policy, settings)) for policy in policies}
    plan.begin(folder, made)
    _work(made, settings, folder, console)
    summary = _finish(folder, made, ends)
    _print_whole(tables.figures(summary["results"]))
    if layout is Layout.SEARCH_R1:
        _print_search_r1(summary, console)
    _say_what_was_odd(summary, console)
    console.print(f"report  {folder / 'report.html'}\nfigures {folder / 'results.json'}", highlight=False)
    if not any(entry["questions"] for entry in summary["results"]):
        raise UserError(f"every question failed: {summary['failures'][0]['failure']}")


@app.command()
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="FOLDER[:POLICY[/METHOD]]")],
    b: Annotated[str, typer.Argument(metavar="B", help="FOLDER[:POLICY[/METHOD]]")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Page to write.", show_default="B's comparison.html")
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="Questions to print, won and lost each.")] = _READ,
) -> None:
    """Is B better than A? Paired by question; won and lost questions with both trajectories.

    Without a policy the first of a folder is meant, without a method search.
    """
    from forage_cli.evaluation import report, tables
    from forage_cli.evaluation.compare import Outcome, trajectories
    from forage_cli.evaluation.compare import compare as compared

    console = Console()
    found = compared(a, b)
    for outcome in (Outcome.WON, Outcome.LOST):
        some = found.where(outcome)
        if not some or not count:
            continue
        console.rule(f"{outcome} by B: {len(some)}")
        uids = [pair.a.uid for pair in some[:count]]
        sides = [trajectories(selection, uids) for selection in (found.a, found.b)]
        for pair in some[:count]:
            both = [side.get(pair.a.uid) for side in sides]
            console.print(tables.side_by_side(both, pair.a.question, console.width))
    console.rule("B against A")
    _print_whole(tables.comparison(found))
    file = report.write_comparison(found, out or found.b.folder / report.COMPARISON)
    console.print(f"report  {file}", highlight=False)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Of a finished evaluation.")],
    layout: Annotated[
        Layout | None, typer.Option(help="Also print the table of this paper.", show_default=False)
    ] = None,
) -> None:
    """Print an evaluation once more, and make its results.json and report.html anew."""
    from forage_cli.evaluation import report as pages
    from forage_cli.evaluation import results, tables

    console = Console()
    page = pages.write(folder)
    summary = results.read_results(folder)
    _print_whole(tables.figures(summary["results"]))
    if layout is Layout.SEARCH_R1:
        _print_search_r1(summary, console)
    _say_what_was_odd(summary, console)
    console.print(f"report  {page}", highlight=False)


def _files_and_settings(arguments: list[str]) -> tuple[list[Path], list[str]]:
    from forage_common.errors import UserError

    settings = [text for text in arguments if "=" in text and not Path(text).exists()]
    files = [Path(text) for text in arguments if text not in settings]
    if not files:
        raise UserError("no questions: name Parquet files, for instance data/world/test.parquet")
    return files, settings


def _baselines(text: str) -> tuple[tuple[Method, ...], bool]:
    """The methods beside search, and whether the untrained policy is one of the baselines."""
    from forage_cli.evaluation.methods import Method
    from forage_common.errors import UserError

    known = [*(method for method in Method if method is not Method.SEARCH), UNTRAINED]
    names = {NONE: [], EVERY: known}.get(text, text.split(","))
    for name in names:
        if name not in known:
            raise UserError(f"--baselines names {name!r}: expected some of {', '.join(known)}; {EVERY}, or {NONE}")
    chosen = tuple(method for method in Method if method is Method.SEARCH or method in names)
    return chosen, UNTRAINED in names


def _policies(named: list[str], untrained: Path | None, with_untrained: bool) -> tuple[EvaluatedPolicy, ...]:
    from forage_cli.evaluation import policies

    found = [policies.resolve(text) for text in named]
    if with_untrained or untrained:
        found.append(policies.untrained(found, untrained))
    return policies.distinct(found)


def _config_of(policies: tuple[EvaluatedPolicy, ...]) -> Path | None:
    """A run's policy is evaluated as the run was set up."""
    return next((policy.run / "settings.yaml" for policy in policies if policy.run), None)


def _known(policies: tuple[EvaluatedPolicy, ...], settings: Settings) -> tuple[EvaluatedPolicy, ...]:
    """The policies with what only the services, or the settings, know of them."""
    import asyncio

    from forage_cli.evaluation import engines
    from forage_cli.evaluation.policies import RUNNING, Kind, distinct, resolve
    from forage_cli.local import serving
    from forage_cli.local.stack import Program

    if not any(policy.label != UNTRAINED for policy in policies):
        configured = settings.rollout.engine.endpoint or str(settings.model.path)
        default = RUNNING if serving.is_running(settings, Program.ROLLOUT) else configured
        policies = distinct([resolve(default), *policies])
    engines.check(policies, settings)
    return tuple(
        asyncio.run(engines.what_runs(policy, settings)) if policy.kind is Kind.RUNNING else policy
        for policy in policies
    )


def _plan(
    files: list[Path],
    policies: tuple[EvaluatedPolicy, ...],
    methods: tuple[Method, ...],
    settings: Settings,
    samples: int,
    temperature: float | None,
    seed: int,
    limit: int | None,
) -> tuple[Plan, Settings]:
    """The plan, and the settings of services that are started for it."""
    from forage_cli.evaluation import engines, plan
    from forage_cli.evaluation.policies import Kind
    from forage_common.errors import UserError
    from forage_common.files.questions import read_questions

    if temperature is None:
        temperature = settings.rollout.temperature if samples > 1 else 0.0
    if samples > 1 and temperature == 0:
        raise UserError(f"--samples {samples} at temperature 0 would all be the same: give --temperature, or 1 sample")
    questions = read_questions(files)
    rows = _first(questions.rows, limit)
    if not rows:
        raise UserError(f"{', '.join(map(str, files))} has no questions")
    theirs = any(policy.kind is Kind.RUNNING for policy in policies)
    if not theirs:
        settings = engines.prepared(settings, methods, [row.data_source for row in rows.values()])
    draw = plan.Draw(samples, temperature, settings.rollout.top_p, settings.rollout.top_k, seed)
    known = {} if theirs else plan.circumstances(settings)
    return plan.Plan(tuple(files), questions.digest, rows, policies, methods, draw, limit, known), settings


def _first(rows: tuple[Question, ...], limit: int | None) -> dict[int, Question]:
    """The first questions of every file, by their place among all."""
    from collections import Counter

    taken: Counter[int] = Counter()
    found = {}
    for index, row in enumerate(rows):
        taken[row.file] += 1
        if limit is None or taken[row.file] <= limit:
            found[index] = row
    return found


def _work(plan: Plan, settings: Settings, folder: Path, console: Console) -> None:
    """Do what is left of the plan."""
    from functools import partial

    from forage_cli.evaluation import run as running
    from forage_common.files.journal import Journal
    from forage_common.v1.trajectory_pb2 import TrajectoryGroup

    with Journal(folder / running.JOURNAL, TrajectoryGroup) as journal:
        items = running.left(plan, journal)
        total = sum(1 for _ in plan.items())
        if not items:
            return
        if len(items) < total:
            console.print(f"{total - len(items)} of {total} were done before", highlight=False)
        try:
            running.run(plan, items.values(), settings, journal, console, partial(progress, console))
        except KeyboardInterrupt:
            done = total - len(running.left(plan, journal))
            console.print(f"stopped: {done} of {total} are done; the same command goes on", highlight=False)
            raise


def _finish(folder: Path, plan: Plan, ends: dict[str, str]) -> dict[str, Any]:
    """Write everything that follows from what was done.

    Args:
        ends: label of a policy → text with which its tokenizer ends a turn.
    """
    from forage_cli.evaluation import report, results
    from forage_cli.evaluation import run as running
    from forage_common.files.journal import Journal
    from forage_common.v1.trajectory_pb2 import TrajectoryGroup

    with Journal(folder / running.JOURNAL, TrajectoryGroup) as journal:
        results.write(folder, running.finished(plan, journal), lambda item: ends[item.policy.label])
    report.write(folder)
    return results.read_results(folder)


def _empty(folder: Path) -> None:
    """Remove an evaluation, and nothing else.

    Raises:
        UserError: the folder holds something else.
    """
    import shutil

    from forage_cli.evaluation.plan import MANIFEST
    from forage_common.errors import UserError

    if not folder.exists():
        return
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{folder} is no evaluation, --fresh does not remove it: name another folder with --out")
    shutil.rmtree(folder)


def _print_whole(tables: RenderableType) -> None:
    """Print them at their own width: a narrow terminal breaks lines, but loses no figure."""
    console = Console()
    needed = console.measure(tables, options=console.options.update(max_width=_WIDEST)).maximum
    Console(width=max(console.width, needed)).print(tables)


def _print_search_r1(summary: dict[str, Any], console: Console) -> None:
    from forage_cli.evaluation import tables
    from forage_cli.evaluation.layouts import SEARCH_R1, search_r1

    lines = search_r1(summary["results"])
    if lines:
        _print_whole(tables.search_r1(lines))
    else:
        console.print(f"no data source of the paper was evaluated (it has {', '.join(SEARCH_R1)})", style="yellow")


def _say_what_was_odd(summary: dict[str, Any], console: Console) -> None:
    for policy, versions in summary["versions"].items():
        if len(versions) > 1:
            text = f"{policy} changed meanwhile: versions {versions[0]} to {versions[-1]} answered"
            console.print(text, style="yellow", highlight=False)
    for entry in summary["failures"][:_READ]:
        text = f"{entry['policy']}/{entry['method']} failed at {entry['uid']}: {entry['failure']}"
        console.print(text, style="yellow", highlight=False, markup=False)
    if summary["failures"]:
        console.print("failed questions are in no mean; the same command tries them again", style="yellow")
