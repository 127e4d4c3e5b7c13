"""`make bench-datapath`: a step's 512 x 16 trajectories, from the bytes of the stream to the input of every rank.

Two ways, each in fresh processes (rank 0 and another one, over gloo on loopback):

- before: plain protobuf, decoded in the thread of the step, and every tensor of every row broadcast to every rank;
- now: packed groups, decoded ahead on threads into columns; ranks read the columns of their rows from files.

Phases: `ahead` (decoding, beside the step before), then on the critical path `figures` (metrics and digest), `build`
(rank 0's matrices), `read` (until every rank has its input), `values` (advantages and two kinds of log-probabilities to
the ranks), `results` (log-probabilities back) and `keep` (the groups as durable files). No model computes.

Trajectories of 2,000 tokens are all there. Of those of 32,000, which would need 40 GiB before, there is a part: seconds
and bytes of the whole are that many times as much, which is printed as computed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
GROUPS, SAMPLES, RANKS = 512, 16, 2
CASES = {"2k": (2_000, 512), "32k": (32_000, 16)}
"""Tokens of a trajectory, and groups that are really there."""
WAYS = ("before", "now")
CRITICAL = ("figures", "build", "read", "values", "results", "keep")


def run_way(way: str, groups: int, tokens: int) -> dict[str, Any]:
    """Run both ranks; returns phases of rank 0, CPU seconds of all, and the peak of each rank above its start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="forage-datapath-"))
    try:
        ranks = []
        for rank in range(RANKS):
            place = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
            environment = os.environ | place | {"LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
            numbers = [str(groups), str(SAMPLES), str(tokens)]
            command = [sys.executable, str(HERE / "one_rank.py"), way, *numbers, str(folder)]
            ranks.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, encoding="utf-8")
            )
        lines = [rank.communicate(timeout=1500)[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            sys.exit(f"a rank of '{way}' failed: its messages are above")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = [json.loads(next(line for line in text.splitlines() if line.startswith("{"))) for text in lines]
    return {
        "phases": {phase: wall for phase, (wall, _) in found[0]["seconds"].items()},
        "cpu_s": sum(one["cpu_s"] for one in found),
        "peaks": [one["peak_gib"] - one["base_gib"] for one in found],
        "bytes": found[0]["plain_bytes" if way == "before" else "packed_bytes"],
    }


def merge(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of rounds."""
    phases = {name: statistics.median(one["phases"][name] for one in rounds) for name in rounds[0]["phases"]}
    peaks = [statistics.median(values) for values in zip(*(one["peaks"] for one in rounds), strict=True)]
    cpu_s = statistics.median(one["cpu_s"] for one in rounds)
    return {"phases": phases, "peaks": peaks, "cpu_s": cpu_s, "bytes": rounds[0]["bytes"]}


def print_case(name: str, groups: int, ways: dict[str, dict[str, Any]]) -> None:
    rows = groups * SAMPLES
    print(f"\n{name} tokens: {groups} x {SAMPLES} = {rows} trajectories, {RANKS} ranks, medians")
    heads = "".join(f"{phase:>9}" for phase in ("ahead", *CRITICAL))
    print(f"{'':8}{heads}{'critical':>10}{'CPU s':>8}  peak GiB of rank 0, 1   kB each")
    for way, one in ways.items():
        figures = "".join(f"{one['phases'][phase]:9.2f}" for phase in ("ahead", *CRITICAL))
        peaks = ", ".join(f"{peak:.2f}" for peak in one["peaks"])
        total = sum(one["phases"][phase] for phase in CRITICAL)
        print(f"{way:8}{figures}{total:10.2f}{one['cpu_s']:8.1f}  {peaks:>22}   {one['bytes'] / rows / 1000:.0f}")


def summarize(name: str, groups: int, ways: dict[str, dict[str, Any]]) -> dict[str, float]:
    scale = GROUPS / groups
    critical = {way: sum(one["phases"][phase] for phase in CRITICAL) * scale for way, one in ways.items()}
    # Before, decoding held the interpreter of the step, wherever it ran.
    critical["before"] += ways["before"]["phases"]["ahead"] * scale
    peaks = {way: [peak * scale for peak in one["peaks"]] for way, one in ways.items()}
    if scale != 1:
        print(f"computed for {GROUPS} x {SAMPLES}: {scale:g} times as much")
    for way in ways:
        each = ", ".join(f"{peak:.1f}" for peak in peaks[way])
        print(f"{way}: {critical[way]:.1f} s on the critical path, peaks of {each} GiB")
    result = {f"{name}_critical_s_{way}": critical[way] for way in ways}
    result |= {f"{name}_peak_gib_{way}_rank_{rank}": peaks[way][rank] for way in ways for rank in range(RANKS)}
    result |= {f"{name}_cpu_s_{way}": one["cpu_s"] * scale for way, one in ways.items()}
    return result | {
        f"{name}_critical_ratio": critical["before"] / critical["now"],
        f"{name}_cpu_ratio": ways["before"]["cpu_s"] / ways["now"]["cpu_s"],
        f"{name}_peak_ratio": max(peaks["before"]) / max(peaks["now"]),
        f"{name}_bytes_ratio": ways["before"]["bytes"] / ways["now"]["bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of an eighth: to see that it works")
    arguments = parser.parse_args()
    summary: dict[str, float] = {}
    for name, (tokens, groups) in CASES.items():
        groups = groups // 8 if arguments.quick else groups
        rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for _ in range(1 if arguments.quick else arguments.rounds):
            for way in WAYS:
                rounds[way].append(run_way(way, groups, tokens))
        ways = {way: merge(found) for way, found in rounds.items()}
        print_case(name, groups, ways)
        summary |= summarize(name, groups, ways)
    summary |= {"ranks": RANKS, "rounds": 1 if arguments.quick else arguments.rounds, "load": os.getloadavg()[0]}
    print(json.dumps({key: round(value, 3) for key, value in summary.items()}))


if __name__ == "__main__":
    main()
