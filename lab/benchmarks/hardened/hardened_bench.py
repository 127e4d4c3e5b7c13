"""`make bench-hardened`: the demo with and without `security.profile=hardened`; a table, then one JSON object.

The baseline is the default profile. The two demos of a pair have the same seed, so they sample and train nearly the
same tokens (`tokens_ratio`), and run one after the other, in every second pair the hardened one first: a machine that
others share changes its speed from minute to minute. A step's seconds are their mean without the first ones; `update`
is the part of them that is arithmetic of the trainer alone, which the profile does not touch, and so shows how fast the
machine was. Seconds of CPU are those of all processes of a run. A ratio is the geometric mean over the pairs, with its
standard error; above 1 it is a cost.
"""

from __future__ import annotations

import argparse
import json
import math
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

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDER = REPOSITORY / "runs/bench-hardened"
PROFILES = ("default", "hardened")
RATIOS = ("step_s", "step_over_update", "tokens", "cpu_s", "minutes")
COLUMNS = ("seed", "profile", "step_s", "update_s", "cpu_s", "minutes", "em_before", "em_after", "groups_lost")
WARM = 2
"""Steps at the start that are not timed: caches and connections are still cold."""
_SAMPLE_S = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4, help="runs of each profile")
    parser.add_argument("--steps", type=int, default=25, help="optimizer steps of a run; 0: the demo's own")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first pair")
    parser.add_argument("settings", nargs="*", help="overrides of both profiles")
    arguments = parser.parse_args()
    steps = [f"trainer.total_training_steps={arguments.steps}"] if arguments.steps else []
    rows: list[dict[str, Any]] = []
    for pair in range(arguments.pairs):
        for profile in PROFILES if pair % 2 == 0 else PROFILES[::-1]:
            rows.append(Demo(profile, arguments.seed + pair, [*steps, *arguments.settings]).run())
        shown = ", ".join(f"{row['profile']} {row['step_s']:.3f} s" for row in rows[-2:])
        print(f"pair {pair + 1} of {arguments.pairs}, a step: {shown}", file=sys.stderr)
    table = Table(title="the demo as it is by default, and with everything on")
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
        command += [f"run.dir={self.folder}", f"security.profile={self.profile}", *self.settings]
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

    def run(self) -> dict[str, Any]:
        """Wait for its end; returns its row of the table."""
        try:
            while self.sample():
                time.sleep(_SAMPLE_S)
        finally:
            if self.process.poll() is None:
                self.process.terminate()
        if self.process.wait():
            sys.exit(f"the demo of the profile {self.profile} with seed {self.seed} failed: see {self.log}")
        summary = json.loads((self.folder / "latest/summary.json").read_text(encoding="utf-8"))
        lines = [
            json.loads(line) for line in (self.folder / "latest/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ][WARM:]
        step_s, update_s = (statistics.mean(line["seconds"][part] for line in lines) for part in ("total", "update"))
        times = {"step_s": step_s, "update_s": update_s, "step_over_update": step_s / update_s}
        work = {"cpu_s": sum(self.cpu.values()), "tokens": sum(line["tokens"] for line in lines)}
        return {**summary, **times, **work, "seed": self.seed, "profile": self.profile}


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures."""
    by_run = {(row["seed"], row["profile"]): row for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    logs = {
        name: [math.log(by_run[seed, "hardened"][name] / by_run[seed, "default"][name]) for seed in seeds]
        for name in RATIOS
    }
    gains = {
        profile: statistics.median(row["em_after"] - row["em_before"] for row in rows if row["profile"] == profile)
        for profile in PROFILES
    }
    return {
        **{f"{name}_ratio": round(math.exp(statistics.mean(logs[name])), 4) for name in RATIOS},
        **{f"{name}_error": measure_error(logs[name]) for name in RATIOS},
        **{f"{name}_ratios": [round(math.exp(log), 4) for log in logs[name]] for name in RATIOS},
        "em_gain": {profile: round(gain, 4) for profile, gain in gains.items()},
        "groups_lost": sum(row["groups_lost"] for row in rows),
        "groups_duplicated": sum(row["groups_duplicated"] for row in rows),
    }


def measure_error(logs: list[float]) -> float | None:
    """Standard error of their mean."""
    return round(statistics.stdev(logs) / math.sqrt(len(logs)), 4) if len(logs) > 1 else None


if __name__ == "__main__":
    main()
