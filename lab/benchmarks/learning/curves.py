"""The picture of `make bench-learning`: one panel a recipe, one line a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol


class Curve(Protocol):
    """Greedy exact match before and after, and that of each step's sampled answers."""

    @property
    def before(self) -> float: ...
    @property
    def after(self) -> float: ...
    @property
    def curve(self) -> Sequence[float]: ...


def draw(recipes: Mapping[str, Mapping[int, Curve]], file: Path) -> Path:
    """Exact match of sampled answers over steps as lines, greedy before and after as diamonds; by title and seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, panels = pyplot.subplots(
        1, len(recipes), figsize=(2.8 * len(recipes), 2.8), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (title, seeds) in zip(panels[0], recipes.items(), strict=True):
        for number, (seed, run) in enumerate(seeds.items()):
            steps = range(1, len(run.curve) + 1)
            axes.plot(steps, run.curve, color=f"C{number}", linewidth=1, label=f"seed {seed}")
            axes.plot([0, len(run.curve)], [run.before, run.after], "D", color=f"C{number}", markersize=4)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("step", fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_ylim(-0.03, 1.03)
        axes.grid(alpha=0.25)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("exact match", fontsize=8)
    panels[0][0].legend(fontsize=6, frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=80)
    pyplot.close(figure)
    return file
