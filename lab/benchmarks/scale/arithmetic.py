"""What 8, 64 and 512 GPUs ask of dispatchers, agents and Redis, from what `scale_bench.py --write` measured.

    python arithmetic.py

Prints the tables of lab/results/scale.md. Measured: CPU time, commands and bytes of a trajectory
(`measured.json`). Assumed: `Fleet`. All else is multiplication.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

MEASURED = Path(__file__).resolve().parent / "measured.json"
SIZES = (8, 64, 512)
_GBIT = 1e9 / 8


@dataclass(frozen=True)
class Fleet:
    """What is assumed of the engines and the run.

    Attributes:
        engine_share: of the GPUs that sample; each is one engine.
        tokens_s: sampled tokens a second of an engine: 256 sequences at 25 ms a token.
        slots: sequences of an engine at once.
        busy: share of its time in which a trajectory is in an engine, not searching, scored or waiting for others.
        core_use: of a core that an event loop may take; above it, it is late.
        kept_steps: steps whose groups are on the stream at the same time.
        step_trajectories: of one step, for each GPU.
        sampled_share: of a trajectory's tokens.
    """

    engine_share: float = 0.5
    tokens_s: float = 10_000
    slots: int = 256
    busy: float = 0.7
    core_use: float = 0.6
    kept_steps: int = 4
    step_trajectories: int = 128
    sampled_share: float = 0.45


@dataclass(frozen=True)
class Trajectory:
    """The cost of one.

    Attributes:
        tokens: of which `Fleet.sampled_share` are sampled.
        cpu_ms: part → CPU milliseconds.
        commands: of Redis.
        bytes: on the stream.
    """

    tokens: int
    cpu_ms: dict[str, float]
    commands: float
    bytes: float


def read_measured() -> tuple[Trajectory, float]:
    """The trajectory of 2,000 tokens, and bytes of one of 32,000."""
    found = json.loads(MEASURED.read_text(encoding="utf-8"))
    short = Trajectory(round(found["tokens"]), found["cpu_ms"], found["redis_commands"], found["redis_bytes_in"])
    return short, float(found["bytes_32k"])


def compute(gpus: int, trajectory: Trajectory, fleet: Fleet) -> dict[str, float]:
    """Compute what so many GPUs need."""
    engines = gpus * fleet.engine_share
    rate = engines * fleet.tokens_s / (trajectory.tokens * fleet.sampled_share)
    moved = rate * trajectory.bytes

    def count(part: str) -> int:
        return math.ceil(rate * trajectory.cpu_ms[part] / 1000 / fleet.core_use)

    return {
        "engines": engines,
        "trajectories/s": rate,
        "trajectories in flight": engines * fleet.slots / fleet.busy,
        "dispatchers": count("dispatchers"),
        "agents": count("agents"),
        "reward workers": count("reward"),
        "cores besides engines' and trainer's": rate * sum(trajectory.cpu_ms.values()) / 1000,
        "Redis: commands/s": rate * trajectory.commands,
        "Redis: share of a core": rate * trajectory.cpu_ms["redis"] / 1000,
        "Redis: Gbit/s in, and the same out": moved / _GBIT,
        "Redis: GB on the stream": fleet.kept_steps * fleet.step_trajectories * gpus * trajectory.bytes / 1e9,
    }


def format_table(trajectory: Trajectory, fleet: Fleet = Fleet()) -> str:
    """A table in Markdown, a column for each size."""
    columns = [compute(gpus, trajectory, fleet) for gpus in SIZES]
    lines = ["| | " + " | ".join(f"{gpus} GPUs" for gpus in SIZES) + " |", "|---|" + "---|" * len(SIZES)]
    for name in columns[0]:
        lines.append(f"| {name} | " + " | ".join(_format(column[name]) for column in columns) + " |")
    return "\n".join(lines)


def _format(value: float) -> str:
    if value >= 100:
        return f"{float(f'{value:.2g}'):,.0f}"
    return f"{value:.0f}" if value == round(value) else f"{value:.2g}"


def extrapolate(short: Trajectory, tokens: int, bytes_: float) -> Trajectory:
    """A longer trajectory, if all CPU time grew with its tokens: an upper bound, as much of it is of a generation."""
    factor = tokens / short.tokens
    cpu_ms = {part: factor * milliseconds for part, milliseconds in short.cpu_ms.items()}
    return Trajectory(tokens, cpu_ms, short.commands, bytes_)


def main() -> None:
    short, long_bytes = read_measured()
    print(f"{short.tokens:,} tokens\n\n{format_table(short)}\n")
    print(f"32,000 tokens\n\n{format_table(extrapolate(short, 32_000, long_bytes))}")


if __name__ == "__main__":
    main()
