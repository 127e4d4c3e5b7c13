"""`forage eval`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from typer.core import TyperGroup

from forage_cli.commands.options import BasePort, Config, load_run_settings
from forage_cli.evaluation.layouts import Layout
from forage_runtime.text.console import TextConsole

if TYPE_CHECKING:
    from forage_cli.evaluation.plan import EvaluationPlan
    from forage_runtime.settings import Settings

PaperLayout = Annotated[Layout | None, typer.Option(help="Also print the table of this paper.", show_default=False)]
_READ = 3
"""Questions of each outcome, and failures, that are printed."""
_WIDEST = 400


class _RunByDefault(TyperGroup):
    """`forage eval FILE …` is `forage eval run FILE …`: a first word that is no command belongs to `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == ["--verify"]:
            args = ["verify", *args[1:]]
        elif args and args[0] not in (*self.commands, *self.get_help_option_names(ctx)):
            args = ["run", *args]
        return list(super().parse_args(ctx, args))


app = typer.Typer(cls=_RunByDefault, no_args_is_help=True, rich_markup_mode="rich")


@app.callback()
def _group() -> None:
    """Evaluate policies on files of questions beside baselines; report and compare.

    [bold]forage eval data/world/test.parquet --policy runs/latest@latest --baselines all[/]
    the newest policy of the latest run, the one it was started from, and three baselines without searches

    [bold]forage eval test.parquet --policy before=models/a --policy after=models/b --samples 8[/]
    two named policies, with pass@k and majority@k

    [bold]forage eval nq.parquet popqa.parquet --policy https://host/v1 --layout search-r1[/]
    a remote model, with the table of the Search-R1 paper

    [bold]forage eval compare runs/evaluations/x:before runs/evaluations/x:after[/]
    the difference of two policies, and the questions it comes from

    [bold]forage eval test.parquet --policy runs/latest@best --card card.json[/]
    [bold]forage eval verify card.json[/]
    numbers with all that they depend on, and the same evaluation again, which says whether it agrees

    'forage eval FILE' means 'forage eval run FILE'; 'forage eval run --help' lists the options.
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
            show_default="running services, else model.path",
        ),
    ] = None,
    untrained: Annotated[
        Path | None,
        typer.Option(help="Model folder of the policy before training.", show_default="the initial policy of RUN"),
    ] = None,
    baselines: Annotated[
        str, typer.Option(help="Some of direct, cot, rag, untrained, joined by commas; or all, or none.")
    ] = "none",
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Samples per question.")] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="0 = greedy.", show_default="0; with several samples that of the settings"),
    ] = None,
    seed: Annotated[int, typer.Option(min=1, help="Seed of the first sample of the first question.")] = 1,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first so many questions of every file.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder to write or to continue.", show_default="runs/evaluations/NAME"),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Remove the results of another evaluation in the folder.")
    ] = False,
    card: Annotated[
        Path | None,
        typer.Option(help="Write the numbers with all that they depend on to this file.", show_default=False),
    ] = None,
    layout: PaperLayout = None,
    config: Config = None,
    base_port: BasePort = None,
) -> None:
    """Evaluate policies on questions.

    Every policy answers every question with searches, and with each baseline's prompt. Uses running services
    ('running'), or starts them and switches them from policy to policy. After Ctrl-C or a crash the same command
    continues: finished questions are kept, failed ones are retried.
    """
    from forage_cli.evaluation import cards, request
    from forage_runtime.errors import UserError

    console = TextConsole()
    files, overrides = request.split_arguments(arguments)
    methods, with_untrained = request.parse_baselines(baselines)
    policies = request.resolve_policies(policy or [], untrained, with_untrained)
    settings = load_run_settings(config or request.find_run_config(policies), overrides, base_port, "eval")
    policies = request.complete_policies(policies, settings)
    if card is not None:
        cards.require_known(policies)
        if card.is_dir():
            raise UserError(f"--card {card} is a folder: give the file to write, such as {card / 'card.json'}")
    work, settings = request.make_plan(files, policies, methods, settings, samples, temperature, seed, limit)
    folder = out or settings.run.dir / "evaluations" / _name_evaluation(work)
    work, summary = _evaluate(work, settings, folder, fresh, console)
    _print_results(summary, layout, console)
    _print_files(folder, console)
    if not any(entry["questions"] for entry in summary["results"]):
        raise UserError(f"every question failed: {summary['failures'][0]['failure']}")
    if card is not None:
        cards.write_card(cards.build_card(work, settings, folder, summary, cards.find_commit()), card)
        console.print(f"card    {card}", highlight=False)


@app.command()
def verify(
    card: Annotated[Path, typer.Argument(help="File of 'forage eval … --card FILE'.", show_default=False)],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[QUESTIONS]... [SETTINGS]...",
            help="Where the card's questions are on this machine, and settings such as data.corpus=corpus.jsonl.",
            show_default="those of the card",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FOLDER or NAME=URL: where the card's policy NAME is; repeat.", show_default="the card's"
        ),
    ] = None,
    config: Config = None,
    base_port: BasePort = None,
) -> None:
    """Evaluate again what a card describes, and say whether its numbers hold.

    Questions, policies, settings and template must be those of the card; the first line says what is another one.
    Exit code 1: a number of the card does not hold.
    """
    from forage_cli.evaluation import cards, request, tables
    from forage_cli.evaluation.plan import MANIFEST
    from forage_cli.evaluation.results import RESULTS
    from forage_runtime.errors import UserError

    console = TextConsole()
    read = cards.read_card(card)
    files, overrides = request.split_arguments(arguments or [], read.questions.files)
    given = [*(policy or [])]
    named = {text.partition("=")[0] for text in given}
    given += [f"{one.label}={one.source}" for one in read.policies if one.label not in named]
    policies = request.resolve_policies(given, None, False)
    settings = load_run_settings(
        config or request.find_run_config(policies), [*read.list_settings(), *overrides], base_port, "eval"
    )
    policies = request.complete_policies(policies, settings)
    cards.require_known(policies)
    drawn = read.sampling
    work, settings = request.make_plan(
        files, policies, read.methods, settings, drawn.samples, drawn.temperature, drawn.seed, read.questions.limit
    )
    if differences := cards.list_differences(read, cards.describe_inputs(work, settings)):
        raise UserError(f"{card} is of other inputs: {'; '.join(differences)}")
    name = f"{_name_evaluation(work)}-verified-{cards.hash_inputs(read)[:8]}"
    folder = settings.run.dir / "evaluations" / name
    is_over = (folder / MANIFEST).exists() and (folder / RESULTS).exists()  # else a run that was interrupted goes on
    work, summary = _evaluate(work, settings, folder, is_over, console)
    again = cards.build_card(work, settings, folder, summary)
    verified = cards.verify_results(read, again)
    searched, is_other = cards.describe_searched(read, again)
    _print_whole(tables.render_verified(verified))
    if searched:
        console.print(searched, style="red" if is_other else "yellow", highlight=False)
    _print_files(folder, console)
    holds = all(one.verdict.holds for one in verified) and not is_other
    console.print(f"{card}: {'every number holds' if holds else 'does not hold'}", highlight=False)
    if not holds:
        raise typer.Exit(1)


def _name_evaluation(work: EvaluationPlan) -> str:
    files = (f"{file.absolute().parent.name}-{file.stem}" for file in work.files)
    return "-".join([*files, *(policy.label for policy in work.policies)])


def _evaluate(
    work: EvaluationPlan, settings: Settings, folder: Path, fresh: bool, console: Console
) -> tuple[EvaluationPlan, dict[str, Any]]:
    """Run what is left of a plan and write its results; returns the plan as it began, and results.json's content."""
    from forage_cli.evaluation import plan
    from forage_cli.evaluation import report as pages
    from forage_cli.evaluation import run as running
    from forage_runtime.files.model_folder import read_end_of_turn

    if fresh:
        plan.remove_evaluation(folder)
    turn_ends = {policy.label: read_end_of_turn(policy.folder or settings.model.path) for policy in work.policies}
    work = plan.claim_folder(folder, work)
    running.run_unfinished(work, settings, folder, console)
    running.write_finished(work, folder, turn_ends)
    return work, pages.write_report(folder)


def _print_files(folder: Path, console: Console) -> None:
    from forage_cli.evaluation.report import REPORT
    from forage_cli.evaluation.results import RESULTS

    console.print(f"report  {folder / REPORT}\nresults {folder / RESULTS}", highlight=False)


@app.command()
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="FOLDER\\[:POLICY\\[/METHOD]]")],
    b: Annotated[str, typer.Argument(metavar="B", help="FOLDER\\[:POLICY\\[/METHOD]]")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Report page to write.", show_default="comparison.html in the folder of B"),
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="Won questions, and lost ones, to print.")] = _READ,
) -> None:
    """Compare B with A, paired by question; prints won and lost questions with both trajectories.

    POLICY defaults to the first of the folder, METHOD to search.
    """
    from forage_cli.evaluation import report, tables
    from forage_cli.evaluation.compare import compare_selections as compared
    from forage_cli.evaluation.compare import read_first_samples
    from forage_records.statistics import Outcome

    console = TextConsole()
    comparison = compared(a, b)
    for outcome in (Outcome.WON, Outcome.LOST):
        some = comparison.pairs_with(outcome)
        if not some or not count:
            continue
        console.rule(f"{outcome} by B: {len(some)}")
        uids = [pair.a.uid for pair in some[:count]]
        sides = [read_first_samples(selection, uids) for selection in (comparison.a, comparison.b)]
        for pair in some[:count]:
            both = [side.get(pair.a.uid) for side in sides]
            console.print(tables.render_side_by_side(both, pair.a.question, console.width))
    console.rule("B against A")
    _print_whole(tables.render_comparison(comparison))
    file = report.write_comparison(comparison, out or comparison.b.folder / report.COMPARISON)
    console.print(f"report  {file}", highlight=False)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished evaluation.")], layout: PaperLayout = None
) -> None:
    """Print a finished evaluation again, and rewrite its results.json and report.html."""
    from forage_cli.evaluation import report as pages

    console = TextConsole()
    _print_results(pages.write_report(folder), layout, console)
    console.print(f"report  {folder / pages.REPORT}", highlight=False)


def _print_results(summary: dict[str, Any], layout: Layout | None, console: Console) -> None:
    """Print the tables and warnings of a finished evaluation, from the content of its results.json."""
    from forage_cli.evaluation import tables
    from forage_cli.evaluation.layouts import SEARCH_R1, make_search_r1_rows

    _print_whole(tables.render_results(summary["results"]))
    if layout is Layout.SEARCH_R1:
        if rows := make_search_r1_rows(summary["results"]):
            _print_whole(tables.render_search_r1(rows))
        else:
            text = f"no data source of the paper was evaluated (it has {', '.join(SEARCH_R1)})"
            console.print(text, style="yellow")
    for policy, versions in summary["versions"].items():
        if len(versions) > 1:
            text = f"{policy} changed during the evaluation: versions {versions[0]} to {versions[-1]} answered"
            console.print(text, style="yellow", highlight=False)
    for entry in summary["failures"][:_READ]:
        text = f"{entry['policy']}/{entry['method']} failed at {entry['uid']}: {entry['failure']}"
        console.print(text, style="yellow", highlight=False, markup=False)
    if summary["failures"]:
        console.print("failed questions enter no mean; run the same command to retry them", style="yellow")


def _print_whole(tables: RenderableType) -> None:
    """Print tables at their own width: a narrow terminal wraps lines, but cuts no value off."""
    console = TextConsole()
    needed = console.measure(tables, options=console.options.update(max_width=_WIDEST)).maximum
    TextConsole(width=max(console.width, needed)).print(tables)
