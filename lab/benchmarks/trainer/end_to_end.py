"""The whole stack, as `forage demo` runs it, for a few steps: samples a second, and where a step's time went."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forage_cli.local.home import find_home

LEAD = 2
"""First steps that do not count: the pipeline fills, and everything runs for the first time."""


@dataclass(frozen=True)
class EndToEnd:
    """generation_s, training_s: medians over steps, of what the trainer waited for trajectories and of all the rest.

    parts: medians of the seconds of a step's parts; summary: the run's summary.json.
    """

    samples_per_s: float
    generation_s: float
    training_s: float
    parts: dict[str, float]
    summary: dict[str, Any]


def run(folder: Path, base_port: int, steps: int, *settings: str, recipe: Path | None = None) -> EndToEnd:
    """Train for so many steps, by the demo's recipe or another one; the folder is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    place = [f"run.dir={folder.parent}", f"run.id={folder.name}", f"trainer.total_training_steps={steps}"]
    command = [f"{find_home()}/.venvs/cli/bin/forage", "demo", "--base-port", str(base_port)]
    command += ["-c", str(recipe)] if recipe is not None else []
    command += [*place, "data.val_max_samples=16", *settings]
    file = folder.with_suffix(".log")
    with file.open("w") as log:
        if subprocess.run(command, cwd=find_home(), stdout=log, stderr=log).returncode:
            sys.exit(f"the run in {folder} failed: see {file}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    counted = lines[LEAD:]
    waits = [line["seconds"]["wait"] for line in counted]
    rest = [line["seconds"]["total"] - line["seconds"]["wait"] for line in counted]
    return EndToEnd(
        sum(line["trajectories"] for line in counted) / (lines[-1]["time"] - lines[LEAD - 1]["time"]),
        statistics.median(waits),
        statistics.median(rest),
        {
            part: statistics.median(line["seconds"].get(part, 0.0) for line in counted)
            for part in counted[-1]["seconds"]
        },
        json.loads((folder / "summary.json").read_text(encoding="utf-8")),
    )
