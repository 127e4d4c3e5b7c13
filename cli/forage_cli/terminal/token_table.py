"""Tokens of a step's trajectories in a terminal: coloured by advantage or mismatch, and as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from forage_cli.terminal.tables import make_table
from forage_cli.terminal.trajectories import STYLES
from forage_records.step_file import StepRow
from forage_records.trajectory_rows import compute_differences
from forage_records.view_options import Colour
from forage_runtime.text.terminal import printable
from forage_runtime.text.token_texts import TokenTexts

_GOOD, _BAD = (0, 200, 0), (220, 40, 40)


def select_values(step: StepRow, colour: Colour) -> dict[int, float]:
    """Response token → value shown in colour; tokens that were not trained on have none."""
    if colour is Colour.MISMATCH:
        return compute_differences(step)
    pairs = zip(step.loss_mask or (), step.advantages or (), strict=True)
    return {place: value for place, (one, value) in enumerate(pairs) if one}


def colour_response(step: StepRow, texts: TokenTexts, colour: Colour, scale: float) -> Text:
    """Colour the response: green for values above 0, red below, full strength at `scale`; observations stay cyan."""
    own = step.trajectory
    values = select_values(step, colour)
    body = Text()
    for place, text in enumerate(texts(own.token_ids[own.prompt_length :])):
        style = (
            _choose_shade(values[place], scale)
            if place in values
            else STYLES["model" if own.loss_mask[place] else "env"]
        )
        body.append(printable(text), style=style)
    return body


def compute_scale(steps: Sequence[StepRow], colour: Colour) -> float:
    """Compute the largest absolute value, which gets the strongest colour."""
    return max((abs(value) for step in steps for value in select_values(step, colour).values()), default=0.0)


def render_table(step: StepRow, texts: TokenTexts, count: int) -> Table | Text:
    """Render the tokens with the largest difference between the trainer's and the engine's log-probabilities."""
    own, apart = step.trajectory, compute_differences(step)
    if not apart:
        return Text("took no part in the step: the trainer has no log-probabilities of it", style="dim")
    mean = sum(map(abs, apart.values())) / len(apart)
    title = f"{len(apart)} tokens of the policy, trainer − engine: mean {mean:.2g}"
    found = make_table("token", "text", "engine", "trainer", "difference", "advantage", left=2, title=title)
    said = texts(own.token_ids[own.prompt_length :])
    for place in sorted(apart, key=lambda place: abs(apart[place]), reverse=True)[:count]:
        found.add_row(
            str(place),
            Text(repr(said[place])[1:-1]),
            *(_format_number(values, place) for values in (step.engine_log_probs, step.log_probs)),
            f"{apart[place]:+.2g}",
            _format_number(step.advantages, place),
        )
    return found


def _format_number(values: list[float] | None, place: int) -> str:
    return "–" if values is None else f"{values[place]:.4f}"


def _choose_shade(value: float, scale: float) -> str:
    strength = min(1.0, abs(value) / scale) if scale else 0.0
    full = _GOOD if value > 0 else _BAD
    red, green, blue = (round(150 + (channel - 150) * strength) for channel in full)
    return f"rgb({red},{green},{blue})"
