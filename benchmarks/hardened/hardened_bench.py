"""`make bench-hardened`: the demo with and without `security.profile=hardened`; a table, then one JSON object.

The baseline is the default profile. The two demos of a pair have the same seed and run side by side: the speed of a
machine that others share changes by more from minute to minute than the profile costs, and so both see the same of it.
A step's seconds are the mean over the steps that a run did while both were training, without the first ones. Seconds of
CPU are those of all processes of a run. A ratio is the median over the pairs, and above 1 a cost. Waits of one demo are
filled by the other's work: it shows costs of processor time, not of latency.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "runs/bench-hardened"
PORTS = {"default": 21_600, "hardened": 22_600}
"""Profile → first port of its services."""
RATIOS = ("step_s", "cpu_s", "minutes")
COLUMNS = ("seed", "profile", "step_s", "steps", "cpu_s", "minutes", "em_before", "em_after", "groups_lost")
WARM = 2
"""Steps at the start that are not timed: caches and connections are still cold."""
_SAMPLE_S = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="runs of each profile")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of a run; 0: the demo's own")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first pair")
    parser.add_argument("settings", nargs="*", help="overrides of both profiles")
    arguments = parser.parse_args()
    steps = [f"trainer.total_training_steps={arguments.steps}"] if arguments.steps else []
    rows: list[dict[str, Any]] = []
    for pair in range(arguments.pairs):
        rows += run_pair(arguments.seed + pair, [*steps, *arguments.settings])
        shown = ", ".join(f"{row['profile']} {row['step_s']:.3f} s" for row in rows[-2:])
        print(f"pair {pair + 1} of {arguments.pairs}, a step: {shown}", file=sys.stderr)
    table = Table(title="the demo with everything on, and as it is by default, side by side")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v := row[column], float) else str(v) for column in COLUMNS))
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)
    print(json.dumps(summarise(rows)))


@dataclass
class Demo:
    """One demo that runs, and the CPU seconds of its processes, also of those that have ended."""

    profile: str
    seed: int
    settings: list[str]
    cpu: dict[tuple[int, float], float] = field(default_factory=dict)
    """(process id, start) → CPU seconds when it was last seen."""

    def __post_init__(self) -> None:
        self.folder = FOLDER / f"seed{self.seed}-{self.profile}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / "demo.log"
        command = [f"{REPOSITORY}/.venvs/cli/bin/forage", "demo", "--no-console", "--seed", str(self.seed)]
        command += ["--base-port", str(PORTS[self.profile]), f"run.dir={self.folder}"]
        command += [f"security.profile={self.profile}", *self.settings]
        with self.log.open("w") as output:
            self.process = psutil.Popen(command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT)

    def sample(self) -> bool:
        """Note what its processes have used; False once it has ended."""
        if self.process.poll() is not None:
            return False
        for process in (self.process, *self.process.children(recursive=True)):
            try:
                times = process.cpu_times()
                self.cpu[process.pid, process.create_time()] = times.user + times.system
            except psutil.NoSuchProcess:
                continue
        return True

    def read_steps(self) -> list[tuple[float, float]]:
        """(end in seconds since 1970, seconds) of each step that is timed."""
        lines = [json.loads(line) for line in (self.folder / "latest/metrics.jsonl").read_text().splitlines()]
        return [(line["time"], line["seconds"]["total"]) for line in lines[WARM:]]

    def describe(self, steps: list[tuple[float, float]], begin: float, end: float) -> dict[str, Any]:
        """Its row of the table, by those of its steps that are within that time."""
        summary = json.loads((self.folder / "latest/summary.json").read_text())
        seconds = [taken for ended, taken in steps if begin <= ended - taken and ended <= end]
        times = {"step_s": statistics.mean(seconds), "steps": len(seconds), "cpu_s": sum(self.cpu.values())}
        return {**summary, **times, "seed": self.seed, "profile": self.profile}


def run_pair(seed: int, settings: list[str]) -> list[dict[str, Any]]:
    """Run a demo of each profile side by side; returns their rows of the table."""
    demos = [Demo(profile, seed, settings) for profile in PORTS]
    try:
        while any([demo.sample() for demo in demos]):
            time.sleep(_SAMPLE_S)
    finally:
        for demo in demos:
            if demo.process.poll() is None:
                demo.process.terminate()
    for demo in demos:
        if demo.process.wait():
            sys.exit(f"the demo of the profile {demo.profile} with seed {seed} failed: see {demo.log}")
    timed = [demo.read_steps() for demo in demos]
    begin = max(steps[0][0] - steps[0][1] for steps in timed)
    end = min(steps[-1][0] for steps in timed)
    return [demo.describe(steps, begin, end) for demo, steps in zip(demos, timed, strict=True)]


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures."""
    by_run = {(row["seed"], row["profile"]): row for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    ratios = {
        name: [by_run[seed, "hardened"][name] / by_run[seed, "default"][name] for seed in seeds] for name in RATIOS
    }
    gains = {
        profile: statistics.median(row["em_after"] - row["em_before"] for row in rows if row["profile"] == profile)
        for profile in PORTS
    }
    return {
        **{f"{name}_ratio": round(statistics.median(ratios[name]), 4) for name in RATIOS},
        "step_s_ratios": [round(ratio, 4) for ratio in ratios["step_s"]],
        "cpu_s_ratios": [round(ratio, 4) for ratio in ratios["cpu_s"]],
        "em_gain": {profile: round(gain, 4) for profile, gain in gains.items()},
        "groups_lost": sum(row["groups_lost"] for row in rows),
        "groups_duplicated": sum(row["groups_duplicated"] for row in rows),
    }


if __name__ == "__main__":
    main()
