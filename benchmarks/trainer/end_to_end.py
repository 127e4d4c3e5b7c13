"""The whole stack, as `forage demo` runs it, for a few steps: samples a second, and where a step's time went."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from forage_cli.local.stack import repository

LEAD = 2
"""First steps that do not count: the pipeline fills, and everything runs for the first time."""


@dataclass(frozen=True)
class EndToEnd:
    """generation_s, training_s: medians over steps, of what the trainer waited for trajectories and of all the rest."""

    samples_per_s: float
    generation_s: float
    training_s: float


def run(folder: Path, base_port: int, staleness: int, steps: int) -> EndToEnd:
    """Train the tiny policy for so many steps with `trainer.max_staleness`; the folder is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = [
        f"run.dir={folder.parent}",
        f"run.id={folder.name}",
        f"trainer.max_staleness={staleness}",
        f"trainer.total_training_steps={steps}",
        "data.val_max_samples=16",
    ]
    command = [f"{repository()}/.venvs/cli/bin/forage", "demo", "--base-port", str(base_port), *settings]
    file = folder.with_suffix(".log")
    with file.open("w") as log:
        if subprocess.run(command, cwd=repository(), stdout=log, stderr=log).returncode:
            sys.exit(f"the run with max_staleness {staleness} failed: see {file}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    counted = lines[LEAD:]
    waits = [line["seconds"]["wait"] for line in counted]
    rest = [line["seconds"]["total"] - line["seconds"]["wait"] for line in counted]
    return EndToEnd(
        sum(line["trajectories"] for line in counted) / (lines[-1]["time"] - lines[LEAD - 1]["time"]),
        statistics.median(waits),
        statistics.median(rest),
    )
