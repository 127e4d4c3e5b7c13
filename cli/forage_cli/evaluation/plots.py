"""The plots of an evaluation's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forage_cli.evaluation.methods import Method
from forage_cli.reports import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Metrics = Mapping[str, Any]
_MARKERS = "oDs^vPX*"


def format_series(entry: Metrics) -> str:
    """Name of a series: policy and method."""
    return f"{entry['policy']} · {Method(entry['method']).display_name}"


@figures.apply_style()
def plot_exact_match(results: Sequence[Metrics]) -> Figure:
    """Plot exact match as bars with intervals: one group per data source, one bar per policy and method."""
    from matplotlib import pyplot

    sources = list(dict.fromkeys(entry["data_source"] for entry in results))
    series = list(dict.fromkeys(map(format_series, results)))
    width = 0.8 / len(series)
    figure: Figure
    figure, axes = pyplot.subplots(figsize=(9, 3.6 + 0.22 * len(series)))
    for place, title in enumerate(series):
        own = [entry for entry in results if format_series(entry) == title and entry["em"] is not None]
        x = [sources.index(entry["data_source"]) + (place - (len(series) - 1) / 2) * width for entry in own]
        means = [entry["em"]["mean"] for entry in own]
        below = [entry["em"]["mean"] - entry["em"]["low"] for entry in own]
        above = [entry["em"]["high"] - entry["em"]["mean"] for entry in own]
        axes.bar(x, means, width * 0.9, label=title, **_choose_style(place))
        axes.errorbar(x, means, [below, above], fmt="none", color=figures.INK, linewidth=1, capsize=2)
    axes.set_xticks(range(len(sources)), sources)
    axes.set_ylabel("exact match")
    axes.set_ylim(0, 1.02)
    axes.grid(axis="x", visible=False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2 if len(series) > 2 else len(series), fontsize=9)
    return figure


@figures.apply_style()
def plot_searches(results: Sequence[Metrics]) -> Figure:
    """Plot exact match against searches per question."""
    from matplotlib import pyplot

    figure: Figure
    series = list(dict.fromkeys(map(format_series, results)))
    sources = list(dict.fromkeys(entry["data_source"] for entry in results))
    markers = {source: _MARKERS[place % len(_MARKERS)] for place, source in enumerate(sources)}
    figure, axes = pyplot.subplots(figsize=(9, 3.6 + 0.11 * (len(series) + len(sources))))
    for entry in results:
        if entry["em"] is not None and entry["searches"] is not None:
            place, marker = series.index(format_series(entry)), markers[entry["data_source"]]
            x, y = entry["searches"], entry["em"]["mean"]
            axes.plot(x, y, marker, **_choose_style(place), markersize=8)
    # One colour per policy and method, one marker per data source.
    for place, title in enumerate(series):
        axes.plot([], [], "s", **_choose_style(place), label=title)
    for source in sources if len(sources) > 1 else ():
        axes.plot([], [], markers[source], color=figures.QUIET, label=source)
    axes.set_xlabel("searches per question")
    axes.set_ylabel("exact match")
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlim(left=-0.05)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=9)
    return figure


@figures.apply_style()
def plot_samples(results: Sequence[Metrics]) -> Figure:
    """Plot pass@k (solid) and majority@k (dashed) of each policy and method, over all data sources."""
    from matplotlib import pyplot

    figure: Figure
    figure, axes = pyplot.subplots(figsize=(9, 3.8))
    for place, title in enumerate(dict.fromkeys(map(format_series, results))):
        *_, entry = (entry for entry in results if format_series(entry) == title)  # the last is of all data sources
        for kind, line in (("pass_at_k", "o-"), ("majority_at_k", "s--")):
            found = {int(k): value for k, value in entry.get(kind, {}).items() if value is not None}
            if not found:
                continue
            x = list(found)
            label = f"{title}, {'pass' if kind == 'pass_at_k' else 'majority'}@k"
            axes.plot(x, [found[k]["mean"] for k in x], line, color=_choose_colour(place), label=label)
            low, high = [found[k]["low"] for k in x], [found[k]["high"] for k in x]
            axes.fill_between(x, low, high, color=_choose_colour(place), alpha=0.12, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("k samples")
    axes.set_ylabel("share of questions")
    axes.set_ylim(-0.02, 1.02)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=9)
    return figure


def _choose_colour(place: int) -> str:
    return figures.SERIES[place % len(figures.SERIES)]


def _choose_style(place: int) -> dict[str, Any]:
    return {"color": _choose_colour(place), "alpha": 1.0 if place < len(figures.SERIES) else 0.55}
