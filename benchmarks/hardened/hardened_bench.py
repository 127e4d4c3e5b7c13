"""`make bench-hardened`: the demo with and without `security.profile=hardened`; a table, then one JSON object.

The baseline is the default profile, in the same run of this command: pairs of one seed, so that other load of the
machine affects both. A step's seconds are the mean over the steps of a run, its waits included: some steps wait for
trajectories and others do not, and their median, also in the table, falls among either. The ratio is the median over
the pairs. Seconds of CPU are those of every process of a run, whoever started it, and hardly depend on other load.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[2]
PROFILES = ("default", "hardened")
TIMES = ("step_s", "median_step_s", "cpu_s", "minutes")
COLUMNS = ("seed", "profile", *TIMES, "em_before", "em_after", "logprob_diff_mean", "groups_lost")
_SUBREAPER = 36
"""prctl's PR_SET_CHILD_SUBREAPER: processes whose parents have ended become ours, so that their time is counted."""
WARM = 2
"""Steps at the start that are not timed: caches and connections are still cold."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3, help="runs of each profile")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of a run; 0: the demo's own")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first pair")
    parser.add_argument("settings", nargs="*", help="overrides of both profiles")
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    steps = [f"trainer.total_training_steps={arguments.steps}"] if arguments.steps else []
    runs: list[dict[str, Any]] = []
    for pair in range(arguments.pairs):
        for profile in PROFILES if pair % 2 == 0 else reversed(PROFILES):
            runs.append(run_demo(arguments.seed + pair, profile, [*steps, *arguments.settings]))
            print(f"pair {pair + 1} of {arguments.pairs}: {profile} {runs[-1]['step_s']:.3f} s a step", file=sys.stderr)
    table = Table(title="the demo with everything on, and as it is by default")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for run in runs:
        table.add_row(*(f"{v:.4g}" if isinstance(v := run[column], float) else str(v) for column in COLUMNS))
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)
    print(json.dumps(summarise(runs)))


def run_demo(seed: int, profile: str, settings: list[str]) -> dict[str, Any]:
    """Run a demo; returns its row of the table."""
    folder = REPOSITORY / "runs/bench-hardened"
    folder.mkdir(parents=True, exist_ok=True)
    command = [f"{REPOSITORY}/.venvs/cli/bin/forage", "demo", "--no-console", "--seed", str(seed)]
    command += [f"run.dir={folder}", f"security.profile={profile}", *settings]
    log = folder / f"{profile}-seed{seed}.log"
    before = _measure_cpu()
    with log.open("w") as output:
        if subprocess.run(command, cwd=REPOSITORY, stdout=output, stderr=output).returncode:
            sys.exit(f"the demo of the profile {profile} with seed {seed} failed: see {log}")
    _wait_for_orphans()
    summary = json.loads((folder / "latest/summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "latest/metrics.jsonl").read_text().splitlines()]
    steps = [line["seconds"]["total"] for line in lines[WARM:]]
    times = {"step_s": statistics.mean(steps), "median_step_s": statistics.median(steps)}
    return {**summary, **times, "seed": seed, "profile": profile, "cpu_s": _measure_cpu() - before}


def _wait_for_orphans() -> None:
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def _measure_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures: ratios above 1 are a cost."""
    by_seed = {(run["seed"], run["profile"]): run for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    ratios = {
        name: [by_seed[seed, "hardened"][name] / by_seed[seed, "default"][name] for seed in seeds] for name in TIMES
    }
    gains = {
        profile: statistics.median(run["em_after"] - run["em_before"] for run in runs if run["profile"] == profile)
        for profile in PROFILES
    }
    return {
        "step_s_ratio": round(statistics.median(ratios["step_s"]), 4),
        "step_s_ratios": [round(ratio, 4) for ratio in ratios["step_s"]],
        "median_step_s_ratio": round(statistics.median(ratios["median_step_s"]), 4),
        "cpu_s_ratio": round(statistics.median(ratios["cpu_s"]), 4),
        "minutes_ratio": round(statistics.median(ratios["minutes"]), 4),
        "em_gain": {profile: round(gain, 4) for profile, gain in gains.items()},
        "groups_lost": sum(run["groups_lost"] for run in runs),
        "groups_duplicated": sum(run["groups_duplicated"] for run in runs),
    }


if __name__ == "__main__":
    main()
