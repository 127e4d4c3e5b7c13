"""Summary of probes in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from forage_cli.terminal.tables import format_number, make_table

_BARS = " ▁▂▃▄▅▆▇█"
METRICS = {
    "count": "probes",
    "mean_confidence": "mean confidence",
    "rho": "rank correlation ρ",
    "premature": "premature (ρ < 0.4), share",
    "undefined_rho": "… where ρ is undefined",
    "overconfidence": "overconfidence",
    "aoc": "area over the curve",
    "auc_gap": "gap: last confidence − mean height",
    "norm_aoc": "… as a share of the last",
    "no_thought": "without a thought",
}
"""Metric of a set → label, in the order of the table."""


def render_summary(found: Mapping[str, Any]) -> RenderableType:
    """Render the content of summary.json: a table with the metrics and the curve of each set."""
    sets = found["sets"]
    table = make_table("", *sets)
    for key, label in METRICS.items():
        table.add_row(label, *(format_number(one[key], 0 if isinstance(one[key], int) else 3) for one in sets.values()))
    points = found["plan"]["points"]
    for place in range(points + 1):
        label = f"confidence, {100 * place // points} % of the thought"
        table.add_row(
            Text(label, style="bold" if place in (0, points) else ""), *(_format_point(o, place) for o in sets.values())
        )
    tokens = found["computed_tokens"] + found["cached_tokens"]
    share = found["cached_tokens"] / tokens if tokens else 0.0
    cost = f"{found['computed_tokens']:,} tokens computed, {share:.0%} of all came from the prefix cache"
    lines = [Text(cost, style="dim")]
    if found["failed"]:
        lines.append(Text(f"{found['failed']} could not be probed: {'; '.join(found['failures'])}", style="yellow"))
    return Group(table, *lines) if sets else Group(*lines)


def _format_point(one: Mapping[str, Any], place: int) -> str:
    low, high = one["intervals"][place]
    value = one["confidence_at"][place]
    return f"{_BARS[round(8 * value)]} {value:.2f} [{low:.2f}, {high:.2f}]"
