"""`make bench-learning`: trains every recipe with every seed; prints a table, a picture of the curves, one JSON object.

The baseline of each run is its own policy before training, on the same questions. A run that has ended under the same
settings is read from its folder, so that an interrupted benchmark resumes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import curves
from recipes import MASKING, RECIPES, Recipe
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from forage_cli.local.home import find_home
from forage_cli.local.processes import interrupt_on_signals
from forage_cli.local.stack import shift_ports
from forage_records.run_folder import RunFolder
from forage_runtime.settings import load_settings

TICK_S = 1.0
Runs = dict[str, dict[int, "Run"]]


@dataclass(frozen=True)
class Run:
    """Results of one run: greedy exact match before and after; `curve`: that of each step's sampled answers."""

    before: float
    after: float
    minutes: float
    curve: tuple[float, ...]

    @property
    def gain(self) -> float:
        return self.after - self.before

    @property
    def curve_mean(self) -> float:
        """Mean of the curve: the higher, the earlier the policy learned."""
        return statistics.mean(self.curve)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=_numbers, default=[0, 1, 2, 3, 4], help="joined by commas")
    parser.add_argument("--only", type=_names, default=list(RECIPES), help=f"of {','.join(RECIPES)}")
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--base-port", type=int, default=27000, help="first of the ports that the services use")
    parser.add_argument("--runs", type=Path, default=find_home() / "runs" / "bench-learning", help="folder of runs")
    arguments = parser.parse_args()
    seeds = arguments.seeds[:1] if arguments.quick else arguments.seeds
    console = Console()
    console.width = max(console.width, 110)
    results = _run_all([RECIPES[name] for name in arguments.only], seeds, arguments.runs, arguments.base_port, console)
    console.print(_table(results))
    picture = curves.draw({RECIPES[name].title: runs for name, runs in results.items()}, arguments.runs / "curves.png")
    console.print(f"curves {picture}", highlight=False, soft_wrap=True)
    result = _summarize(results)
    print(json.dumps(result))
    missed = [name for name, metrics in result.items() if metrics.get("met") is False]
    if missed:
        sys.exit(f"below the margin: {', '.join(missed)}")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in RECIPES:
            raise argparse.ArgumentTypeError(f"there is no recipe {name!r}: choose of {', '.join(RECIPES)}")
    return names


def _run_all(recipes: Sequence[Recipe], seeds: Sequence[int], runs: Path, base_port: int, console: Console) -> Runs:
    result: Runs = {recipe.name: {} for recipe in recipes}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        overall = progress.add_task("runs", total=len(recipes) * len(seeds))
        for seed in seeds:  # all recipes of a seed first: an interrupted benchmark has results of each
            for recipe in recipes:
                if not _is_done(recipe, runs, seed, base_port):
                    _train(recipe, runs, seed, base_port, progress)
                run = result[recipe.name][seed] = _read(runs / recipe.name / f"seed-{seed}")
                progress.advance(overall)
                console.print(
                    f"{recipe.name} seed {seed}: {run.before:.3f} → {run.after:.3f} in {run.minutes:.1f} min",
                    highlight=False,
                )
    return result


def _is_done(recipe: Recipe, runs: Path, seed: int, base_port: int) -> bool:
    """Whether a run with these settings has left its metrics; ports and the place of the folder may differ."""
    folder = runs / recipe.name / f"seed-{seed}"
    if not (folder / "summary.json").is_file():
        return False
    same = [f"run.dir={folder.parent}", "data.template_date=null", *shift_ports(base_port)]
    return load_settings(folder / "settings.yaml", same) == recipe.resolved(runs, seed, base_port)


def _train(recipe: Recipe, runs: Path, seed: int, base_port: int, progress: Progress) -> None:
    folder = runs / recipe.name / f"seed-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [f"{find_home()}/.venvs/cli/bin/forage", "demo", "-c", str(recipe.file)]
    log = folder.with_suffix(".log")
    steps = recipe.resolved(runs, seed, base_port).trainer.total_training_steps
    recipe.prepare()
    task = progress.add_task(f"{recipe.name} seed {seed}", total=steps)
    read = RunFolder(folder)
    with log.open("w") as output:
        overrides = recipe.settings(runs, seed, base_port)
        process = subprocess.Popen([*command, *overrides], cwd=find_home(), stdout=output, stderr=output)
        try:
            while process.poll() is None:
                at = read.read_progress()
                title = f"{recipe.name} seed {seed}: {at.detail or at.phase}"
                progress.update(task, completed=len(read.read_steps()), description=title)
                time.sleep(TICK_S)
        finally:
            process.terminate()
            process.wait()
    progress.remove_task(task)
    if process.returncode:
        sys.exit(f"{recipe.name} with seed {seed} failed: see {log}")


def _read(folder: Path) -> Run:
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    curve = tuple(float(step["em_mean"]) for step in RunFolder(folder).read_steps())
    return Run(summary["em_before"], summary["em_after"], summary["minutes"], curve)


def _table(result: Runs) -> Table:
    table = Table(title="greedy exact match on held-out questions")
    for column in ("recipe", "seed", "before", "after", "gain", "margin", "steps", "minutes"):
        table.add_column(column, justify="left" if column == "recipe" else "right")
    for name, runs in result.items():
        margin = RECIPES[name].margin
        for seed, run in runs.items():
            row = (name, str(seed), *(f"{value:.3f}" for value in (run.before, run.after, run.gain)))
            table.add_row(*row, "–" if margin is None else f"{margin:.2f}", str(len(run.curve)), f"{run.minutes:.1f}")
        table.add_section()
    return table


def _summarize(results: Runs) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {}
    for name, runs in results.items():
        margin = RECIPES[name].margin
        if margin is not None:
            gains = [_round(run.gain) for run in runs.values()]
            least = min(gains)
            result[name] = {"gain_min": least, "gains": gains, "margin": margin, "met": least >= margin}
    masked, unmasked = (results.get(name) for name in MASKING)
    if masked and unmasked:
        pairs = [(masked[seed], unmasked[seed]) for seed in masked]
        result["masking"] = {
            "end": _compare([(one.after, other.after) for one, other in pairs]),
            "on_the_way": _compare([(one.curve_mean, other.curve_mean) for one, other in pairs]),
        }
    return result


def _compare(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """`better`: which is higher for every seed, "neither" where seeds disagree."""
    differences = [masked - unmasked for masked, unmasked in pairs]
    return {
        "masked": [_round(masked) for masked, _ in pairs],
        "unmasked": [_round(unmasked) for _, unmasked in pairs],
        "difference_mean": _round(statistics.mean(differences)),
        "better": "masked" if min(differences) > 0 else "unmasked" if max(differences) < 0 else "neither",
    }


def _round(value: float) -> float:
    return round(value, 4)


if __name__ == "__main__":
    try:
        with interrupt_on_signals():
            main()
    except KeyboardInterrupt:
        sys.exit("stopped: the same command resumes with the missing runs")
