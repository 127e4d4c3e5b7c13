"""Lines over a logarithmic x axis, as an SVG image."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 460, 70, 150, 20, 50
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
_TICKS = 5


class Point(NamedTuple):
    """A place (x > 0) and what it says there."""

    x: float
    y: float
    label: str


def lines(series: Mapping[str, Sequence[Point]], x_title: str, y_title: str) -> str:
    """The image; every line has its name at the right."""
    points = [point for line in series.values() for point in line]
    decades = [math.log10(point.x) for point in points]
    x_low, x_high = math.floor(min(decades)), max(math.ceil(max(decades)), math.floor(min(decades)) + 1)
    y_low, y_high = min(point.y for point in points), max(point.y for point in points)
    y_low, y_high = y_low - 0.05 * (y_high - y_low or 1), y_high + 0.05 * (y_high - y_low or 1)

    def x(value: float) -> float:
        return LEFT + (math.log10(value) - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        f' font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    ]
    for decade in range(x_low, x_high + 1):
        at = x(10.0**decade)
        parts.append(f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{10.0**decade:,g}</text>')
    for tick in range(_TICKS + 1):
        value = y_low + tick * (y_high - y_low) / _TICKS
        at = y(value)
        parts.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{value:.3f}</text>')
    for number, (name, line) in enumerate(series.items()):
        color = COLORS[number % len(COLORS)]
        path = " ".join(f"{x(point.x):.1f},{y(point.y):.1f}" for point in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for point in line:
            at_x, at_y = x(point.x), y(point.y)
            parts.append(f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="3.5" fill="{color}"/>')
            parts.append(f'<text x="{at_x + 5:.1f}" y="{at_y - 6:.1f}">{html.escape(point.label)}</text>')
        parts.append(
            f'<text x="{WIDTH - RIGHT + 12}" y="{TOP + 16 * (number + 1)}" fill="{color}">{html.escape(name)}</text>'
        )
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text x="{middle_x}" y="{HEIGHT - 10}" text-anchor="middle">{html.escape(x_title)}</text>')
    parts.append(
        f'<text transform="translate(16 {middle_y}) rotate(-90)" text-anchor="middle">{html.escape(y_title)}</text>'
    )
    return "\n".join([*parts, "</svg>\n"])
