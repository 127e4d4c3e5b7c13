"""The plot of `forage index eval --sweep`: recall against queries per second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Point(NamedTuple):
    """A point (x > 0) and its label."""

    x: float
    y: float
    label: str


def save_plot(file: Path, series: Mapping[str, Sequence[Point]], x_title: str, y_title: str) -> None:
    """Draw one line per series over a logarithmic x axis, and save it as SVG."""
    # Imported here: only a sweep with --out pays for it.
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, points in series.items():
        axes.plot([point.x for point in points], [point.y for point in points], marker="o", label=name)
        for point in points:
            axes.annotate(point.label, point[:2], xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.set(xscale="log", xlabel=x_title, ylabel=y_title)
    axes.grid(color="#dddddd")
    axes.legend()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(file, format="svg")
