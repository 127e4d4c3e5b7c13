"""The trainer as a process: ended in three ways and started again, it eats the same groups, each of them once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the trainer's environment")
from trainer_parts import ScriptedRollout, read_lines, write_model, write_questions

from forage_common.settings import RedisSettings
from forage_common.streams import StreamClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HALF = 4
BATCH = 3


class TrainerProcess:
    """`python -m forage_trainer` on a small model."""

    def __init__(self, folder: Path, redis: RedisSettings, address: Callable[[], str], run_id: str, steps: int) -> None:
        self.folder = folder / "runs" / run_id
        self.streams = StreamClient(redis, run_id)
        self._steps = steps
        self._command = [sys.executable, "-m", "forage_trainer", f"run.dir={folder / 'runs'}", f"run.id={run_id}"]
        self._command += [
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
        ]

    def start(self) -> subprocess.Popen[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "trainer.log").open("ab") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            return subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)

    def complete(self) -> None:
        assert self.start().wait(200) == 0, self.log[-3000:]

    def run_until(self, step: int) -> subprocess.Popen[bytes]:
        process = self.start()
        deadline = time.monotonic() + 150
        while len(self.metrics) < step:
            assert process.poll() is None, self.log[-3000:]
            assert time.monotonic() < deadline, self.log[-3000:]
            time.sleep(0.02)
        return process

    @property
    def log(self) -> str:
        return (self.folder / "trainer.log").read_text()

    @property
    def metrics(self) -> list[dict[str, object]]:
        path = self.folder / "metrics.jsonl"
        return read_lines(path) if path.exists() else []

    @property
    def eaten(self) -> dict[int, list[str]]:
        """The ledger: step → groups."""
        return {step: list(entry.group_uids) for step, entry in self.streams.ledger().items()}


@pytest.fixture
def trainer(
    tmp_path: Path, redis_server: RedisSettings, free_address: Callable[[], str]
) -> Iterator[Callable[[str, int], TrainerProcess]]:
    write_model(tmp_path / "model")
    write_questions(tmp_path / "train.parquet", 10)
    write_questions(tmp_path / "test.parquet", 5, split="test")
    workers: dict[str, ScriptedRollout] = {}

    def make(run_id: str, steps: int, stale: frozenset[str] = frozenset()) -> TrainerProcess:
        if run_id not in workers:
            workers[run_id] = ScriptedRollout(redis_server, run_id, stale)
            workers[run_id].start()
        return TrainerProcess(tmp_path, redis_server, free_address, run_id, steps)

    yield make
    for worker in workers.values():
        worker.end()


def test_a_run_that_was_extended_killed_and_stopped_eats_the_same_groups_as_one_that_was_not(
    trainer: Callable[..., TrainerProcess],
) -> None:
    straight = trainer("straight", 2 * HALF)
    straight.complete()
    trainer("broken", HALF, frozenset({f"{HALF + 1}/1"})).complete()
    broken = trainer("broken", 2 * HALF)
    killed = broken.run_until(HALF + 1)  # the checkpoint is of step HALF: what came after is trained on again
    killed.kill()
    killed.wait()
    stopped = broken.run_until(2 * HALF - 1)
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(60) == 143, broken.log[-3000:]
    broken.complete()

    assert list(straight.eaten) == list(range(1, 2 * HALF + 1))
    assert broken.eaten == straight.eaten
    eaten = [uid for uids in broken.eaten.values() for uid in uids]
    assert len(eaten) == len(set(eaten)) == 2 * HALF * BATCH
    assert broken.streams.backlog(broken.streams.trajectories) == 0
    assert broken.streams.backlog(broken.streams.prompts) == 0
    again = [name for name in broken.streams.issued() if not name.endswith("/0")]
    assert again == [f"1/{HALF + 1}/1/1"], "the group that came with version 0 was dropped and issued again"
    assert [row["step"] for row in broken.metrics] == list(range(1, 2 * HALF + 1))
    for label, version in (("before", 0), ("after", 2 * HALF)):
        found = json.loads((broken.folder / "validation" / f"{label}.json").read_text())
        assert (found["version"], found["count"], found["failed"]) == (version, 5, 0)
        assert len(read_lines(broken.folder / "validation" / f"{label}.jsonl")) == 5
    assert json.loads((broken.folder / "state.json").read_text())["phase"] == "done"
