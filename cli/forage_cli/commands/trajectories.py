"""`forage trajectories`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from forage_records.view_options import Colour, SortKey
from forage_runtime.text.console import TextConsole

if TYPE_CHECKING:
    from forage_records.run_folder import Row, RunFolder


def trajectories(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")] = Path("runs/latest"),
    label: Annotated[
        str, typer.Option(help="Validation to read: before, after, step-<n>; watch-<n>: watched questions.")
    ] = "after",
    step: Annotated[
        int | None,
        typer.Option(
            help="Read this training step instead (saved every trainer.rollout_data_freq steps).", show_default=False
        ),
    ] = None,
    against: Annotated[
        str, typer.Option(help="Compare with this validation or step, question by question.", show_default=False)
    ] = "",
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Trajectories to print.")] = 5,
    wrong: Annotated[bool, typer.Option("--wrong", help="Only wrong answers.")] = False,
    right: Annotated[bool, typer.Option("--right", help="Only right answers.")] = False,
    find: Annotated[str, typer.Option(help="Only where the question or the text contains this.")] = "",
    source: Annotated[str, typer.Option(help="Only of this data source.")] = "",
    min_reward: Annotated[
        float | None, typer.Option(help="Only with at least this reward.", show_default=False)
    ] = None,
    sort: Annotated[
        SortKey | None,
        typer.Option(help="Sort, largest first; advantage and mismatch need --step.", show_default=False),
    ] = None,
    colour: Annotated[Colour, typer.Option(help="Meaning of the colours; advantage and mismatch need --step.")] = (
        Colour.AUTHOR
    ),
    tokens: Annotated[
        int,
        typer.Option(
            min=0, help="With --step: list the tokens with the largest difference between trainer and engine."
        ),
    ] = 0,
) -> None:
    """Print trajectories of a run: the policy's text (bold), observations (cyan) and the accepted answers.

    Examples:

      forage trajectories runs/latest --label after --wrong --count 3

      forage trajectories --against before --label after

      forage trajectories --step 10 --sort mismatch --tokens 5
    """
    from forage_cli.terminal import token_table
    from forage_cli.terminal import trajectories as show
    from forage_records.run_folder import RunFolder
    from forage_records.trajectory_rows import STEP, Filter, sort_rows
    from forage_runtime.errors import UserError
    from forage_runtime.text.token_texts import TokenTexts

    if step is None and (tokens or colour is not Colour.AUTHOR or sort in (SortKey.ADVANTAGE, SortKey.MISMATCH)):
        raise UserError("advantage and mismatch exist only for a training step: name one, for instance --step 10")
    folder = RunFolder.open(run)
    rows = _read_rows(folder, label, step)
    chosen = list(filter(Filter(None if right == wrong else right, source, find, min_reward), rows))
    console = TextConsole()
    if against:
        earlier = _read_rows(folder, against, int(against) if against.isdecimal() else None)
        _print_changes(console, earlier, chosen, count)
        return
    if sort is not None:
        chosen = sort_rows(chosen, sort)
    shown = chosen[:count]
    texts = TokenTexts(folder.find_model())
    scale = token_table.compute_scale([row[STEP] for row in shown if STEP in row], colour)
    for row in shown:
        body = None if colour is Colour.AUTHOR else token_table.colour_response(row[STEP], texts, colour, scale)
        console.print(show.render_panel(row, body=body))
        if tokens:
            console.print(token_table.render_table(row[STEP], texts, tokens))
    console.print(f"{len(shown)} of {len(chosen)} shown, {len(rows)} in all", style="dim")


def _read_rows(folder: RunFolder, label: str, step: int | None) -> list[Row]:
    """Read the trajectories of a step, or of a validation.

    Raises:
        DataError: the run does not have them; the message says which it has.
    """
    from forage_records.step_file import list_saved_steps, step_file_path
    from forage_records.trajectory_rows import read_step_rows
    from forage_runtime.errors import DataError

    if step is not None:
        kept = list_saved_steps(folder.path)
        if step not in kept:
            known = ", ".join(map(str, kept)) or "none yet: see trainer.rollout_data_freq"
            raise DataError(f"{folder.path} has saved no trajectories of step {step} (saved: {known})")
        return read_step_rows(step_file_path(folder.path, step))
    rows = folder.read_trajectories(label)
    if not rows:
        known = ", ".join(folder.list_validations()) or "none: wait for a validation to end"
        raise DataError(f"{folder.path} has no trajectories of '{label}' yet (there are: {known})")
    if any("spans" not in row for row in rows):
        raise DataError(f"{folder.path / 'validation' / label}.jsonl holds no trajectories: move it elsewhere")
    return rows


def _print_changes(console: Console, before: list[Row], after: list[Row], count: int) -> None:
    from statistics import fmean

    from forage_cli.terminal import trajectories as show
    from forage_records.trajectory_rows import find_changes

    common = find_changes(before, after)
    for change in common[:count]:
        console.print(show.render_panel(change.before[0], title=f"before: mean reward {change.reward_before:.3g}"))
        console.print(show.render_panel(change.after[0], title=f"after: mean reward {change.reward_after:.3g}"))
    if not common:
        hint = "compare validations, or watched questions (watch-<n>, see trainer.watch_questions)"
        console.print(f"the two have no question in common: {hint}", style="dim")
        return
    better = sum(change.gain > 0 for change in common)
    worse = sum(change.gain < 0 for change in common)
    console.print(
        f"{len(common)} questions in both: {better} better, {worse} worse, {len(common) - better - worse} the same; "
        f"mean reward {fmean(c.reward_before for c in common):.3f} → {fmean(c.reward_after for c in common):.3f}",
        style="dim",
    )
