"""What the sizes cost, a trajectory each, and how that grows with their number."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from measures import CONTROL, RedisReading
from rich.console import Console
from rich.table import Table

IDLE_S = 10.0
"""For which the processes are watched while they have nothing to do."""


@dataclass
class Measured:
    """One size."""

    concurrent: int
    seconds: float = 0.0
    completed: int = 0
    errors: int = 0
    generations: int = 0
    searches: int = 0
    tokens: int = 0
    sampled: int = 0
    peak_in_flight: int = 0
    tail_s: float = 0.0
    took_s: list[float] = field(default_factory=list)
    lost_s: list[float] = field(default_factory=list)
    """Of each trajectory: from its end to that of the slowest of its group."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    memory: int = 0
    redis: RedisReading = field(default_factory=lambda: RedisReading(0, 0, 0, 0))
    redis_memory: int = 0
    late_s: dict[str, list[float]] = field(default_factory=dict)
    """Deployment → mean lateness of its event loops in each second or so."""
    problems: dict[str, int] = field(default_factory=dict)

    @property
    def control_cpu_s(self) -> float:
        """CPU seconds of all that is not a stand-in."""
        return sum(self.cpu_s.get(part, 0.0) for part in CONTROL)

    def per_trajectory(self, amount: float) -> float:
        return amount / max(1, self.completed)

    @property
    def cpu_ms_a_trajectory(self) -> float:
        return 1000 * self.per_trajectory(self.control_cpu_s)

    @property
    def cpu_ms_a_generation(self) -> float:
        return 1000 * self.control_cpu_s / max(1, self.generations)

    @property
    def lost_share(self) -> float:
        """Of the time of all samples of a group: what passes from the end of one to that of the slowest."""
        return sum(self.lost_s) / max(1e-9, sum(self.lost_s) + sum(self.took_s))


Row = tuple[str, Callable[[Measured], float], str]


def print_report(console: Console, results: list[Measured], idle: dict[str, float]) -> None:
    """Print a table of all sizes, what the processes use while they are idle, and what went wrong."""
    table = Table(title="the rollout without a model: a trajectory of about 2,000 tokens")
    table.add_column("trajectories at once", no_wrap=True)
    for one in results:
        table.add_column(f"{one.concurrent:,}", justify="right", no_wrap=True)
    for one in results[1:]:
        table.add_column(f"{one.concurrent:,} / {results[0].concurrent:,}", justify="right", no_wrap=True)
    for name, read, form in _list_rows(results):
        values = [read(one) for one in results]
        growth = [f"{value / values[0]:.2f}" if values[0] else "" for value in values[1:]]
        table.add_row(name, *(format(value, form) for value in values), *growth)
    console.print(table)
    shares = ", ".join(f"{part} {100 * share:.1f} %" for part, share in sorted(idle.items()) if share >= 0.001)
    console.print(f"of a core while nothing is in flight, not counted above: {shares}")
    for one in results:
        for problem, count in one.problems.items():
            console.print(f"[red]{one.concurrent} at once: {count} times: {problem}")


def _list_rows(results: list[Measured]) -> list[Row]:
    parts = sorted({part for one in results for part in one.cpu_s}, key=lambda part: (part not in CONTROL, part))

    def read_part(part: str) -> Callable[[Measured], float]:
        return lambda one: 1000 * one.per_trajectory(one.cpu_s.get(part, 0.0))

    def read_late(deployment: str, pick: Callable[[list[float]], float]) -> Callable[[Measured], float]:
        return lambda one: 1000 * pick(one.late_s.get(deployment) or [0.0])

    rows: list[Row] = [
        ("completed", lambda one: one.completed, ",.0f"),
        ("most in flight", lambda one: one.peak_in_flight, ",.0f"),
        ("seconds", lambda one: one.seconds, ",.1f"),
        ("trajectories a second", lambda one: one.completed / one.seconds, ",.1f"),
        ("sampled tokens a second", lambda one: one.sampled / one.seconds, ",.0f"),
        ("tokens a trajectory", lambda one: one.per_trajectory(one.tokens), ",.0f"),
        ("generations a trajectory", lambda one: one.per_trajectory(one.generations), ".2f"),
        ("seconds of a trajectory, mean", lambda one: statistics.mean(one.took_s or [0.0]), ".1f"),
        ("CPU-ms a trajectory, without stand-ins", lambda one: one.cpu_ms_a_trajectory, ".2f"),
        *((f"  {part}{'' if part in CONTROL else ' (stand-in)'}", read_part(part), ".2f") for part in parts),
        ("CPU-ms a generation, without stand-ins", lambda one: one.cpu_ms_a_generation, ".2f"),
        ("Redis: commands a trajectory", lambda one: one.per_trajectory(one.redis.commands), ".2f"),
        ("Redis: kB in a trajectory", lambda one: one.per_trajectory(one.redis.bytes_in) / 1000, ".1f"),
        ("Redis: kB out a trajectory", lambda one: one.per_trajectory(one.redis.bytes_out) / 1000, ".1f"),
        ("Redis: MB at most", lambda one: one.redis_memory / 1e6, ",.1f"),
        ("GiB of all processes at most", lambda one: one.memory / 2**30, ".2f"),
    ]
    for deployment in ("Dispatcher", "Agent", "Engine"):
        rows.append((f"{deployment}: loop late by ms, mean", read_late(deployment, statistics.mean), ",.1f"))
        rows.append((f"{deployment}: worst second", read_late(deployment, max), ",.1f"))
    rows.append(("share of time lost to the slowest of a group", lambda one: one.lost_share, ".3f"))
    rows.append(("seconds lost to the slowest groups at the end", lambda one: one.tail_s, ".1f"))
    return rows


def summarize(results: list[Measured]) -> dict[str, float]:
    """The figures of the last line."""
    first, last = results[0], results[-1]
    return {
        "completed": last.completed,
        "errors": sum(one.errors for one in results),
        f"cpu_{last.concurrent}_over_{first.concurrent}": round(
            last.cpu_ms_a_trajectory / first.cpu_ms_a_trajectory, 3
        ),
        "rss_gib": round(max(one.memory for one in results) / 2**30, 2),
        "control_cpu_ms_a_trajectory": round(last.cpu_ms_a_trajectory, 2),
        "control_cpu_ms_a_generation": round(last.cpu_ms_a_generation, 2),
        "trajectories_per_s": round(last.completed / last.seconds, 1),
        "loop_late_ms": round(1000 * max(statistics.mean(late or [0.0]) for late in last.late_s.values()), 1),
        "lost_to_slowest": round(last.lost_share, 3),
    }


def describe_trajectory(one: Measured) -> dict[str, object]:
    """What `arithmetic` needs of a trajectory."""
    return {
        "trajectories_at_once": one.concurrent,
        "tokens": round(one.per_trajectory(one.tokens)),
        "sampled": round(one.per_trajectory(one.sampled)),
        "generations": round(one.per_trajectory(one.generations), 2),
        "cpu_ms": {part: round(1000 * one.per_trajectory(one.cpu_s.get(part, 0.0)), 3) for part in CONTROL},
        "redis_commands": round(one.per_trajectory(one.redis.commands), 2),
        "redis_bytes_in": round(one.per_trajectory(one.redis.bytes_in)),
    }
