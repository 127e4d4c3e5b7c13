"""`python dying_trainer.py POINT STEP [trainer's arguments]`: the trainer, which kills itself (-9) at one point."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from forage_queue.trainer.batcher import UnackedSteps
from forage_queue.trainer.feeder import Feeder
from forage_runtime import service
from forage_trainer import __main__ as trainer
from forage_trainer.checkpoints.checkpoint import Checkpoints
from forage_trainer.engine.policy_worker import PolicyWorker
from forage_weights.trainer import publisher


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wrap(owner: Any, name: str, is_there: Callable[..., bool], after: bool = False) -> None:
    """Die at the beginning (or the end) of the first call for which `is_there` holds."""
    real = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        there = is_there(*arguments, **named)
        if there and not after:
            die()
        result = real(*arguments, **named)
        if there:
            die()
        return result

    setattr(owner, name, call)


def arm(point: str, step: int) -> None:
    match point:
        case "before_checkpoint":
            wrap(Checkpoints, "begin", lambda _, saved, *__, **___: saved == step)
        case "during_checkpoint":  # the engine's files are written, the manifest is not
            wrap(PolicyWorker, "save", lambda _, folder: folder.parent.name.endswith(f"-step_{step}"), after=True)
        case "after_checkpoint":  # durable, and nothing of it acknowledged
            wrap(UnackedSteps, "acknowledge", lambda _, until: until == step)
        case "publish":  # weights are written, not renamed into place, not announced
            wrap(publisher, "write_description", lambda folder, _: f"-v{step}-" in folder.name, after=True)
        case "before_issue":  # acknowledged, and the next batch not issued
            wrap(Feeder, "issue_up_to_bound", lambda _, version: version == step)
        case _:
            raise ValueError(f"no such point: {point}")


if __name__ == "__main__":
    arm(sys.argv[1], int(sys.argv[2]))
    del sys.argv[1:3]
    service.run_service("trainer", trainer.main)
