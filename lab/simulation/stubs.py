"""Stubs of the maths of a simulated trainer: its step, its worker, and the modules that hold them.

The stub's weights are the list of all groups that they were trained on: a checkpoint shows what it has absorbed.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forage_proto.v1.trajectory_pb2 import Policy
from forage_runtime.settings import Settings
from simulation.gpus import TRAINER

if TYPE_CHECKING:
    from simulation.programs import Programs


_ELEMENTS, _CHANGED = 256, 8
_DENSE = 40
"""Of 256 steps, those after which no delta is worth it."""


class Stopwatch:
    """The part of the real one that the loop uses; that one's module imports the maths."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str, traced: bool = True) -> Iterator[None]:
        yield


class StubWorker:
    """Weights that are the list of the groups they were trained on: [step, [[position, uid, attempt], …]]."""

    parameters, world_size = 100, 1

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self.world = programs.world
        self.trained: list[list[Any]] = []

    def save(self, folder: Path) -> None:
        (folder / "weights.json").write_text(json.dumps(self.trained))

    def load(self, folder: Path) -> None:
        self.trained = json.loads((folder / "weights.json").read_text())

    def move_to_gpu(self) -> None:
        self.world.sleep(self.programs.draw_seconds("move"))
        self.programs.gpus.take(TRAINER)

    def move_to_host(self) -> int:
        self.world.sleep(self.programs.draw_seconds("move"))
        self.programs.gpus.free(TRAINER)
        return 0

    def weights(self, dtype: Any) -> dict[str, torch.Tensor]:
        """Weights of which every step changes a few, or, sometimes, all; they follow from what was trained on."""
        weights, digest = torch.zeros(2, _ELEMENTS), b""
        for number, step in enumerate(self.trained):
            digest = hashlib.sha256(digest + json.dumps(step).encode()).digest()
            changed = torch.tensor(list(digest), dtype=torch.float32)
            if digest[0] < _DENSE:
                weights += 1 + changed.repeat(2, _ELEMENTS // len(changed))
            else:
                weights.view(-1)[(number * _CHANGED) % weights.numel() :][:_CHANGED] = 1 + changed[:_CHANGED]
        return {"first": weights[0], "second": weights[1]}


class StubStep:
    """A step that takes time and absorbs its batch; it has the interface of `PolicyStep`."""

    def __init__(self, settings: Settings, worker: StubWorker, pad_id: int, critic: Any = None) -> None:
        self._max_staleness = settings.trainer.max_staleness
        self._worker = worker
        self.kl = self

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def __call__(
        self, batch: Any, policy: Policy, clock: Stopwatch, check: Callable[[], None], on_record: Any = None
    ) -> dict[str, Any]:
        worker, programs = self._worker, self._worker.programs
        for group in batch.groups:
            versions = [segment.version for row in group.trajectories for segment in row.segments]
            oldest = min(versions, default=policy.version)  # a group that failed has no tokens
            if policy.version - oldest > self._max_staleness:
                worker.world.failures.append(
                    f"staleness: step {batch.number} trains version {policy.version} on tokens of version {oldest}, "
                    f"and max_staleness is {self._max_staleness}"
                )
        for _ in range(2):
            worker.world.sleep(programs.draw_seconds("step") / 2)
            check()
        is_bad, programs.next_step_is_bad = programs.next_step_is_bad, False
        worker.trained.append([batch.number, [[g.position, g.group_uid, g.attempt] for g in batch.groups]])
        rows = sum(len(group.trajectories) for group in batch.groups)
        figures = {"tokens": rows, "trajectories": rows, "failed": 0, "dead_groups": 0, "reward_mean": 1.0}
        return figures | {"loss": math.nan if is_bad else 0.0, "grad_norm": 1.0} | batch.metrics


def replace_maths() -> None:
    """Put stubs in place of the modules that take most of the time to import, before the loop is imported."""
    parts = {
        "forage_trainer.engine.policy_worker": {"PolicyWorker": StubWorker},
        "forage_trainer.step": {"PolicyStep": StubStep, "Stopwatch": Stopwatch},
        "forage_trainer.reporting.trajectories": {
            "StepFiles": lambda settings: types.SimpleNamespace(is_kept=lambda _: False),
            "StepRecord": None,
        },
        "forage_trainer.validation.probe": {"ValidationProbe": None},
    }
    for name, members in parts.items():
        assert name not in sys.modules, f"{name} is imported already: start the simulation in a process of its own"
        module = types.ModuleType(name)
        module.__dict__.update(members)
        sys.modules[name] = module
