"""What a seed stands for: the settings of a run, how long everything takes, and the faults that hit it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forage_runtime.settings import Settings

KINDS = (
    "crash before",
    "crash after",
    "pause before",
    "pause after",
    "lost reply",
    "redis down",
    "second trainer",
    "damaged checkpoint",
    "disk full",
    "clock jump",
    "redis lost",
    "out of reach",
    "prompt deleted",
    "group deleted",
    "group garbled",
    "group forged",
    "engines fail",
    "engines stall",
    "bad step",
    "stop",
    "supervisor killed",
    "policy damaged",
    "policy deleted",
    "cache damaged",
    "cache lost",
    "policies refused",
    "storage down",
    "file damaged",
    "file deleted",
)
QUICK = {"start": (1.0, 20.0), "step": (0.1, 10.0), "sample": (0.2, 6.0), "load": (0.05, 5.0), "check": (0.01, 1.0)}
QUICK |= {"write": (0.05, 4.0), "transfer": (0.01, 1.0), "patch": (0.01, 0.5), "move": (0.05, 3.0)}
SLOW = QUICK | {"sample": (10.0, 60.0)}
"""Shortest and longest seconds of each activity; after 10 s without an arrival the trainer looks for lost groups."""
NOT_PROMISED = ("redis tail lost",)
"""What the trainer refuses to run with (`redis.require_durable`): only tried where asked for."""
STANDS_STILL = frozenset({"pause before", "pause after", "second trainer", "out of reach", "supervisor killed"})
"""After these a process may use shared GPUs that others believe it has left: it stood still, or was replaced alive."""
_TRAINER_ONLY = {"second trainer", "damaged checkpoint", "disk full", "bad step"}


@dataclass(frozen=True)
class Fault:
    """What happens at the n-th commit of a service, counted over its restarts.

    A commit is a command that changes Redis, or a file that appears under its name. delay_s: how long after the commit
    a crash comes. seconds: how long the fault lasts, or how far a clock jumps.
    """

    service: str
    commit: int
    kind: str
    seconds: float = 0.0
    delay_s: float = 0.0

    def __str__(self) -> str:
        later = f", {self.delay_s:.1f} s later" if self.delay_s else ""
        lasts = f" ({self.seconds:.1f} s)" if self.seconds else ""
        return f"{self.kind}{lasts} at commit {self.commit} of {self.service}{later}"


@dataclass(frozen=True)
class Scenario:
    """The run of one seed.

    keep: checkpoints that stay. straggler_s: time after which missing groups are dropped; 0 = never.
    in_flight: groups that a dispatcher runs at once. full_every: as of `trainer.publish`.
    has_storage: policies are copied to an object store. shard_bytes: of published policies; all is one tensor or both.
    shares_cache: all engines are on one machine.
    watch_freq: as of `trainer.watch_questions`.
    has_files: groups are in files, in the object store if there is one.
    is_colocated: trainer and engines take turns on the same GPUs, whatever max_staleness and validation_mode say.
    takes_first: trainer.batching is ready, where max_staleness allows it.
    ranges: shortest and longest seconds of each activity, drawn log-uniformly.
    """

    seed: int
    steps: int
    batch_size: int
    max_staleness: int
    save_freq: int
    test_freq: int
    validation_mode: str
    max_refills: int
    keep: int
    straggler_s: float
    rollouts: int
    engines: int
    in_flight: int
    full_every: int
    has_storage: bool
    shares_cache: bool
    shard_bytes: int
    ranges: dict[str, tuple[float, float]]
    faults: tuple[Fault, ...]
    is_colocated: bool = False
    watch_freq: int = 0
    has_files: bool = False
    takes_first: bool = False

    @property
    def batching(self) -> str:
        return "ready" if self.takes_first and self.max_staleness and not self.is_colocated else "strict"

    def build_settings(self, folder: Path) -> Settings:
        return Settings.model_validate(
            {
                "run": {"id": "run", "dir": folder, "seed": self.seed, "record_history": True},
                "redis": {
                    "url": "redis://127.0.0.1:1/0",
                    "inline_bytes": 0 if self.has_files else None,
                    "payloads_url": "simulated://bucket/groups" if self.has_storage else "",
                },
                "model": {"path": folder / "model"},
                "data": {"train_batch_size": self.batch_size},
                "rollout": {"n": 2, "max_groups_in_flight": self.in_flight},
                "trainer": {
                    "total_training_steps": self.steps,
                    "placement": "colocated" if self.is_colocated else "separate",
                    "max_staleness": 0 if self.is_colocated else self.max_staleness,
                    "batching": self.batching,
                    "save_freq": self.save_freq,
                    "test_freq": self.test_freq,
                    "validation_mode": "paused" if self.is_colocated else self.validation_mode,
                    "watch_questions": {"freq": self.watch_freq, "count": 2},
                    "max_ckpt_to_keep": self.keep,
                    "max_refills": self.max_refills,
                    "publish": {
                        "full_every": self.full_every,
                        "uri": "simulated://bucket/policies" if self.has_storage else "",
                        "shard_bytes": self.shard_bytes,
                    },
                    "batch_timeout_s": 180.0,
                    "straggler_timeout_s": self.straggler_s,
                    "rollout_data_freq": 0,
                    "guards": {"max_rollbacks": 10},
                    "algorithm": {"filter_groups": self.max_refills > 0},
                    "actor": {"ppo_mini_batch_size": self.batch_size},
                },
            }
        )


def draw_scenario(seed: int, kinds: Sequence[str] = KINDS) -> Scenario:
    """The scenario of a seed, with faults of these kinds."""
    draw = random.Random(seed)
    steps, batch_size = draw.randint(3, 7), draw.randint(1, 3)
    rollouts = draw.choice((1, 1, 2))
    slow = draw.random() < 0.4
    ranges = SLOW if slow else QUICK
    has_storage = draw.random() < 0.4
    commits = {"trainer": 20 + steps * (batch_size + (14 if has_storage else 10))}
    commits |= {f"rollout-{i}": 10 + steps * (4 * batch_size + 5) for i in range(1, rollouts + 1)}
    keep = draw.choice((1, 2, 2, 3))
    if keep == 1:  # nothing to go back to
        kinds = [kind for kind in kinds if kind != "damaged checkpoint"] or ["crash after"]
    if not has_storage:
        kinds = [kind for kind in kinds if kind != "storage down"] or ["crash after"]
    has_files = draw.random() < 0.5
    if not has_files:
        kinds = [kind for kind in kinds if not kind.startswith("file ")] or ["crash after"]
    count = min(6, int(draw.expovariate(0.5)) + 1)
    return Scenario(
        seed=seed,
        steps=steps,
        batch_size=batch_size,
        max_staleness=draw.choice((0, 1, 1, 2)),
        save_freq=draw.choice((1, 2, 3, 5, 8)),
        test_freq=draw.choice((-1, 2)),
        validation_mode=draw.choice(("paused", "overlapped")),
        max_refills=draw.choice((0, 0, 1)),
        keep=keep,
        straggler_s=draw.choice((0.0, 0.0, 0.0, 15.0)),
        rollouts=rollouts,
        engines=draw.choice((1, 2)),
        in_flight=draw.choice((2, 32)),
        full_every=draw.choice((1, 2, 3, 3, 4, 16)),
        has_storage=has_storage,
        shares_cache=draw.random() < 0.5,
        shard_bytes=draw.choice((1, 5 * 2**30)),
        ranges=ranges,
        faults=tuple(_draw_fault(draw, commits, kinds) for _ in range(count)),
        is_colocated=draw.random() < 0.25,
        watch_freq=draw.choice((0, 2, 3)),
        has_files=has_files,
        takes_first=draw.random() < 0.5,
    )


def _draw_fault(draw: random.Random, commits: dict[str, int], kinds: Sequence[str]) -> Fault:
    kind = draw.choice(kinds)
    service = "trainer" if kind in _TRAINER_ONLY or draw.random() < 0.6 else draw.choice(list(commits))
    long = 10 ** draw.uniform(0, 2.78)  # 1 to 600 s
    lasting = {
        "pause before": long,
        "pause after": long,
        "redis tail lost": 10 ** draw.uniform(-2, 0),
        "redis down": 10 ** draw.uniform(-1, 2),
        "second trainer": draw.choice((0.0, long)),
        "disk full": 10 ** draw.uniform(0, 2),
        "clock jump": draw.choice((-1, 1)) * 10 ** draw.uniform(0, 3.5),
        "out of reach": long,
        "engines fail": 10 ** draw.uniform(0, 1.5),
        "policies refused": 10 ** draw.uniform(0.5, 2),
        "storage down": 10 ** draw.uniform(0, 2.3),
        "engines stall": 10 ** draw.uniform(1, 2.3),
    }
    delay = draw.choice((0.0, 10 ** draw.uniform(-1, 1.3))) if kind == "crash after" else 0.0
    return Fault(service, draw.randint(1, commits[service]), kind, round(lasting.get(kind, 0.0), 3), round(delay, 3))
