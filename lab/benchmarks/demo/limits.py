"""Runs the demo in each checkout and prints its limit of groups in flight, and trajectories a second, side by side.

    .venvs/cli/bin/python lab/benchmarks/demo/limits.py /path/of/one/commit . trainer.total_training_steps=20

A checkout has environments of its own (`make setup`). The rollout service's `/metrics` is read once a second from the
first group in flight to the last. Prints a table with a column for each checkout, then one JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

INTERVAL_S = 1.0
COUNTS = (
    "groups_in_flight",
    "groups_limit",
    "groups_limit_lowered_total",
    "evictions_total",
    "policy_updates_total",
    "trajectories_total",
)
WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="*", help="checkouts; overrides, e.g. trainer.total_training_steps=20")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    overrides = [one for one in arguments.arguments if "=" in one]
    checkouts = [Path(one).resolve() for one in arguments.arguments if "=" not in one] or [Path.cwd()]
    columns = {str(checkout): run(checkout, arguments.seed, overrides) for checkout in checkouts}
    table = Table(title="the demo's groups in flight")
    table.add_column("")
    for checkout in columns:
        table.add_column(f"{checkout}\n{read_commit(Path(checkout))}", justify="right")
    for name in next(iter(columns.values())):
        table.add_row(name, *(f"{column[name]:.4g}" for column in columns.values()))
    Console().print(table)
    print(json.dumps(columns))


def run(checkout: Path, seed: int, overrides: list[str]) -> dict[str, float]:
    """Run a demo; returns what was measured, by name."""
    name = f"limits-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = checkout / "runs" / name
    command = [".venvs/cli/bin/forage", "demo", "--seed", str(seed), f"run.id={name}", *overrides]
    folder.parent.mkdir(exist_ok=True)
    began, samples = time.monotonic(), []
    with (folder.parent / f"{name}.log").open("w", encoding="utf-8") as log:
        with subprocess.Popen(command, cwd=checkout, stdout=log, stderr=log) as demo:
            while demo.poll() is None:
                time.sleep(INTERVAL_S)
                if (counts := read_counts(folder)) is not None:
                    samples.append((time.monotonic() - began, counts))
        if demo.returncode:
            sys.exit(f"the demo in {checkout} failed: see {log.name}")
    busy = [(at, counts) for at, counts in samples if counts["groups_in_flight"]]
    if len(busy) < 2:
        sys.exit(f"the metrics of the demo in {checkout} were never read while groups were in flight: see {log.name}")
    (first_s, first), (last_s, last) = busy[0], busy[-1]
    limits = [counts["groups_limit"] for _, counts in busy]
    return {
        "mean limit": statistics.fmean(limits),
        "lowest limit": min(limits),
        "cuts of the limit": last["groups_limit_lowered_total"],
        "evictions": last["evictions_total"],
        "policy updates": last["policy_updates_total"],
        "trajectories a second": (last["trajectories_total"] - first["trajectories_total"]) / (last_s - first_s),
        "minutes": (time.monotonic() - began) / 60,
    }


def read_counts(folder: Path) -> dict[str, float] | None:
    """The rollout service's counts now; None while it does not answer."""
    try:
        settings = yaml.safe_load((folder / "settings.yaml").read_text(encoding="utf-8"))
        address = settings["rollout"]["health_address"]
        with WITHOUT_PROXY.open(f"http://{address}/metrics", timeout=5) as reply:
            page = reply.read().decode()
    except (OSError, KeyError):
        return None
    found = {name: re.search(rf"^forage_rollout_{name} (\S+)", page, re.MULTILINE) for name in COUNTS}
    return {name: float(match[1]) for name, match in found.items() if match} if all(found.values()) else None


def read_commit(checkout: Path) -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
