"""`forage eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from typer.core import TyperGroup

from forage_cli.commands.options import BasePort, Config, load_run_settings
from forage_cli.evaluation.layouts import Layout
from forage_runtime.text.console import TextConsole

PaperLayout = Annotated[Layout | None, typer.Option(help="Also print the table of this paper.", show_default=False)]
_READ = 3
"""Questions of each outcome, and failures, that are printed."""
_WIDEST = 400


class _RunByDefault(TyperGroup):
    """`forage eval FILE …` is `forage eval run FILE …`: a first word that is no command belongs to `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *self.get_help_option_names(ctx)):
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
    layout: PaperLayout = None,
    config: Config = None,
    base_port: BasePort = None,
) -> None:
    """Evaluate policies on questions.

    Every policy answers every question with searches, and with each baseline's prompt. Uses running services
    ('running'), or starts them and switches them from policy to policy. After Ctrl-C or a crash the same command
    continues: finished questions are kept, failed ones are retried.
    """
    from forage_cli.evaluation import plan, request
    from forage_cli.evaluation import report as pages
    from forage_cli.evaluation import run as running
    from forage_runtime.errors import UserError
    from forage_runtime.files.model_folder import read_end_of_turn

    console = TextConsole()
    files, overrides = request.split_arguments(arguments)
    methods, with_untrained = request.parse_baselines(baselines)
    policies = request.resolve_policies(policy or [], untrained, with_untrained)
    settings = load_run_settings(config or request.find_run_config(policies), overrides, base_port, "eval")
    policies = request.complete_policies(policies, settings)
    work, settings = request.make_plan(files, policies, methods, settings, samples, temperature, seed, limit)
    folder = out or settings.run.dir / "evaluations" / "-".join(
        [*(f"{file.absolute().parent.name}-{file.stem}" for file in files), *(policy.label for policy in policies)]
    )
    if fresh:
        plan.remove_evaluation(folder)
    turn_ends = {policy.label: read_end_of_turn(policy.folder or settings.model.path) for policy in policies}
    work = plan.claim_folder(folder, work)
    running.run_unfinished(work, settings, folder, console)
    running.write_finished(work, folder, turn_ends)
    summary = pages.write_report(folder)
    _print_results(summary, layout, console)
    console.print(f"report  {folder / pages.REPORT}\nresults {folder / 'results.json'}", highlight=False)
    if not any(entry["questions"] for entry in summary["results"]):
        raise UserError(f"every question failed: {summary['failures'][0]['failure']}")


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
