"""The trainer as a process on a small model, with a scripted rollout service."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from reward_routes import serve_routes
from trainer_parts import ScriptedRollout, read_lines, write_model, write_questions
from waiting import wait_until

from forage_queue.streams.client import StreamClient
from forage_runtime.settings import RedisSettings

BATCH = 3
LIMIT_S = 1500.0
"""Of a whole run."""
_DYING = Path(__file__).with_name("dying_trainer.py")


class TrainerProcess:
    """`python -m forage_trainer` on a small model."""

    def __init__(
        self, folder: Path, redis: RedisSettings, address: Callable[[], str], run_id: str, steps: int, *overrides: str
    ) -> None:
        self.folder = folder / "runs" / run_id
        self.streams = StreamClient(redis, run_id)
        self._steps = steps
        self._settings = [
            f"run.dir={folder / 'runs'}",
            f"run.id={run_id}",
            f"redis.url={redis.url}",
            f"model.path={folder / 'model'}",
            f"data.train_files=[{folder / 'train.parquet'}]",
            f"data.val_files=[{folder / 'test.parquet'}]",
            f"data.train_batch_size={BATCH}",
            f"trainer.actor.ppo_mini_batch_size={BATCH}",
            "rollout.n=4",
            f"trainer.health_address={address()}",
            f"trainer.total_training_steps={steps}",
            "trainer.save_freq=3",
            "trainer.threads=1",
            "trainer.actor.optim.lr=0.001",
            "run.seed=5",
            *overrides,
        ]

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """
        Args:
            command: what to run instead of the trainer itself.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "trainer.log").open("ab") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            line = [sys.executable, *(command or ("-m", "forage_trainer")), *self._settings]
            return subprocess.Popen(line, stdout=log, stderr=log, env=environment)

    def die_at(self, point: str, step: int) -> None:
        """Start, and be killed at a point of `dying_trainer`."""
        assert self.start(str(_DYING), point, str(step)).wait(LIMIT_S) == -signal.SIGKILL, self.log[-3000:]

    def complete(self) -> None:
        assert self.start().wait(LIMIT_S) == 0, self.log[-3000:]

    def run_until(self, step: int) -> subprocess.Popen[bytes]:
        process = self.start()
        self.wait_for_step(process, step)
        return process

    def wait_for_step(self, process: subprocess.Popen[bytes], step: int) -> None:
        """Return once the process has taken the step, and while it still runs."""

        def is_taken() -> bool:
            assert process.poll() is None, self.log[-3000:]
            return len(self.metrics) >= step

        wait_until(is_taken, lambda: self.log[-3000:], LIMIT_S)

    @property
    def log(self) -> str:
        return (self.folder / "trainer.log").read_text()

    @property
    def metrics(self) -> list[dict[str, object]]:
        path = self.folder / "metrics.jsonl"
        return read_lines(path) if path.exists() else []

    @property
    def checkpoint(self) -> int:
        """The step of the newest one."""
        steps = [int(path.name.removeprefix("step_")) for path in self.folder.glob("checkpoints/step_*")]
        return max(steps, default=0)

    @property
    def published(self) -> dict[int, set[str]]:
        """Version → digests under which any process published it."""
        result: dict[int, set[str]] = {}
        for line in self.log.splitlines():
            if line.startswith("{") and (event := json.loads(line)).get("event") == "policy_published":
                result.setdefault(event["version"], set()).update(event["digests"])
        return result

    @property
    def consumed(self) -> dict[int, list[str]]:
        """The ledger: step → groups."""
        return {step: list(entry.group_uids) for step, entry in self.streams.read_ledger().items()}


@pytest.fixture
def trainer(
    tmp_path: Path, redis_server: RedisSettings, free_address: Callable[[], str]
) -> Iterator[Callable[[str, int], TrainerProcess]]:
    write_model(tmp_path / "model")
    write_questions(tmp_path / "train.parquet", 10)
    write_questions(tmp_path / "test.parquet", 5, split="test")
    workers: dict[str, ScriptedRollout] = {}

    def make(run_id: str, steps: int, *overrides: str, stale: frozenset[str] = frozenset()) -> TrainerProcess:
        if run_id not in workers:
            workers[run_id] = ScriptedRollout(redis_server, run_id, stale)
            workers[run_id].start()
        return TrainerProcess(
            tmp_path, redis_server, free_address, run_id, steps, f"reward.grpc_address={rewards}", *overrides
        )

    rewards = free_address()
    with serve_routes(rewards, "world_facts"):
        yield make
    for worker in workers.values():
        worker.end()
