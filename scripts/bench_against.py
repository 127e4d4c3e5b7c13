"""Runs a benchmark of this checkout and of another commit in turns, on one machine, and prints each figure of both.

    bench_against.py --rounds 2 scale HEAD~3 -- --sizes 1000

The other commit is checked out and set up once, in `.cache/against`. Both sides run the benchmark program of this
checkout, whose last line is a JSON object. A figure is the median of the rounds; its ratio is this checkout's over the
other commit's. The last line is one JSON object: figures, ratios, and the load of the machine before each run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
NOW, THEN = "now", "then"


def list_turns(rounds: int) -> list[str]:
    """List who runs when: a machine that grows slower or faster meanwhile does so for both alike."""
    turns = [(THEN, NOW) if number % 2 == 0 else (NOW, THEN) for number in range(rounds)]
    return [side for turn in turns for side in turn]


def find_figures(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Find every number of a JSON value, with its dotted name."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield name, float(value)
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from find_figures(child, f"{name}.{key}" if name else str(key))


def compare(results: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float | None]]:
    """Compare the figures that every run of both sides has."""
    runs = [*results[THEN], *results[NOW]]
    shared = [name for name in runs[0] if all(name in run for run in runs)]
    compared: dict[str, dict[str, float | None]] = {}
    for name in shared:
        then, now = (statistics.median(run[name] for run in results[side]) for side in (THEN, NOW))
        compared[name] = {THEN: then, NOW: now, "ratio": now / then if then else None}
    return compared


def check_out(commit: str, benchmark: str) -> Path:
    """Check out a commit into a folder of its own, with this benchmark, and set it up; returns the folder."""
    digest = _run(["git", "rev-parse", "--verify", f"{commit}^{{commit}}"], REPOSITORY).strip()
    folder = REPOSITORY / ".cache/against" / digest[:12]
    if not folder.is_dir():
        _run(["git", "clone", "--quiet", "--shared", "--no-checkout", str(REPOSITORY), str(folder)], REPOSITORY)
        _run(["git", "checkout", "--quiet", "--detach", digest], folder)
    subprocess.run(["make", "setup"], cwd=folder, check=True)
    program = Path("lab/benchmarks") / benchmark
    shutil.rmtree(folder / program, ignore_errors=True)
    shutil.copytree(REPOSITORY / program, folder / program)
    return folder


def run_benchmark(folder: Path, benchmark: str, arguments: Sequence[str]) -> dict[str, float]:
    """Run a benchmark in a checkout, and return the figures of its last line."""
    command = [str(folder / "lab/benchmarks" / benchmark / "run"), *arguments]
    try:
        lines = _run(command, folder).splitlines()
    except subprocess.CalledProcessError as error:
        sys.exit(f"{folder}: the benchmark ended with code {error.returncode}, after:\n{error.stdout[-2000:]}")
    return dict(find_figures(json.loads(lines[-1])))


def _run(command: Sequence[str], folder: Path) -> str:
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True, encoding="utf-8").stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=sorted(run.parent.name for run in REPOSITORY.glob("lab/benchmarks/*/run")))
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the benchmark, after --")
    options = parser.parse_args()
    arguments = [one for one in options.arguments if one != "--"]
    folders = {THEN: check_out(options.commit, options.benchmark), NOW: REPOSITORY}
    results: dict[str, list[dict[str, float]]] = {THEN: [], NOW: []}
    loads = []
    for side in list_turns(options.rounds):
        loads.append(round(os.getloadavg()[0], 2))
        print(f"{side}: {folders[side]}, load {loads[-1]}", flush=True)
        results[side].append(run_benchmark(folders[side], options.benchmark, arguments))
    compared = compare(results)
    table = Table("figure", THEN, NOW, "ratio", title=f"{options.benchmark}: {options.commit} and this checkout")
    for name, figures in compared.items():
        table.add_row(name, *("" if value is None else f"{value:,.4g}" for value in figures.values()))
    Console(width=120).print(table)
    print(json.dumps({"against": options.commit, "rounds": options.rounds, "load": loads, "figures": compared}))


if __name__ == "__main__":
    main()
