"""`make bench-demo`: runs the demo once for each seed and prints a table, then one JSON object.

The baseline of each run is its own policy before training, evaluated in the same run on the same questions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = (
    "seed",
    "em_before",
    "em_after",
    "em_gain",
    "minutes",
    "steps",
    "logprob_diff_mean",
    "groups_lost",
    "restarts",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("settings", nargs="*", help="overrides, e.g. trainer.total_training_steps=20")
    arguments = parser.parse_args()
    repository = Path(__file__).resolve().parents[3]
    (repository / "runs").mkdir(exist_ok=True)
    runs: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        command = [f"{repository}/.venvs/cli/bin/forage", "demo", "--seed", str(seed), *arguments.settings]
        with (repository / "runs" / f"bench-seed{seed}.log").open("w") as log:
            if subprocess.run(command, cwd=repository, stdout=log, stderr=log).returncode:
                sys.exit(f"the demo with seed {seed} failed: see {log.name}")
        runs.append(json.loads((repository / "runs/latest/summary.json").read_text(encoding="utf-8")))
    table = Table(title="demo: greedy exact match on held-out test entities")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for run in runs:
        table.add_row(*(f"{v:.4g}" if isinstance(v := run[column], float) else str(v) for column in COLUMNS))
    console = Console()
    console.width = max(console.width, 130)
    console.print(table)
    metrics = {
        "em_gain_min": min(run["em_gain"] for run in runs),
        "em_gain_median": statistics.median(run["em_gain"] for run in runs),
        "minutes_max": max(run["minutes"] for run in runs),
        "logprob_diff_mean_max": max(run["logprob_diff_mean"] for run in runs),
        "groups_lost": sum(run["groups_lost"] for run in runs),
        "groups_duplicated": sum(run["groups_duplicated"] for run in runs),
        "runs": [{column: run[column] for column in COLUMNS} for run in runs],
    }
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
