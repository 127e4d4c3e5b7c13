"""`forage check-history` and `forage compare-runs`: what a run's folder proves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from forage_cli.terminal.tables import make_table
from forage_runtime.text.console import TextConsole

_SHOWN = 20


def check_history(
    run: Annotated[Path, typer.Argument(help="Folder of a run that was recorded (run.record_history=true).")] = Path(
        "runs/latest"
    ),
    complete: Annotated[
        bool, typer.Option("--complete", help="Fail unless every step of the run is acknowledged, too.")
    ] = False,
) -> None:
    """Verify a run by its recorded operations, without its ledger. Exit code 1: a rule does not hold.

    Nothing lost, nothing twice, epochs in order, no token of a policy that was not announced. Works on a run that is
    still going, and lists what is outstanding. The last line is one JSON object.

    Example:

      forage demo run.record_history=true && forage check-history runs/latest --complete
    """
    from forage_queue.checker.check import check
    from forage_queue.checker.operations import RESULTS

    report = check(run)
    console = TextConsole(soft_wrap=True, highlight=False, markup=False)
    table = make_table("operation", "all", *RESULTS)
    for kind, counts in report.count_by_kind().items():
        table.add_row(kind, *map(str, (counts.total(), *(counts[name] for name in RESULTS))))
    console.print(table)
    for violation in report.violations[:_SHOWN]:
        console.print(f"violated ({violation.rule}): {violation.sentence}")
        for operation in violation.operations:
            console.print(f"    {operation.describe(report.history.origin)}")
    if len(report.violations) > _SHOWN:
        console.print(f"and {len(report.violations) - _SHOWN} more violations")
    steps = f"{report.steps} of {report.total_steps or '?'} steps acknowledged"
    console.print(steps if report.is_complete else f"so far: {steps}")
    for batch, positions in report.outstanding.items():
        console.print(f"outstanding: batch {batch}, positions {', '.join(map(str, positions))}")
    typer.echo(json.dumps(report.to_json()))
    raise typer.Exit(1 if report.violations or (complete and not report.is_complete) else 0)


def compare_runs(
    first: Annotated[Path, typer.Argument(help="Folder of a run.")],
    second: Annotated[Path, typer.Argument(help="Folder of another run.")],
) -> None:
    """Compare two runs to the bit: the tokens that each step trained on, and the weights after it.

    Exit code 1: they differ, or one has more steps. Runs of the same seed and settings are equal where
    `run.repeatable` is set. The last line is one JSON object.

    Example:

      forage compare-runs runs/first runs/second
    """
    from forage_records import comparison
    from forage_records.run_folder import RunFolder

    result = comparison.compare_runs(RunFolder.open(first), RunFolder.open(second))
    table = make_table("step", "tokens", "", "weights", "", left=5)
    for pair in result.pairs:
        cells = []
        for name in comparison.DIGESTS:
            one, other = pair.show(name)
            cells += [one, "equal" if pair.is_equal(name) else f"differs from {other}"]
        table.add_row(str(pair.step), *cells)
    TextConsole(soft_wrap=True, highlight=False).print(table)
    typer.echo(json.dumps(result.to_json()))
    raise typer.Exit(0 if result.first_difference is None else 1)
