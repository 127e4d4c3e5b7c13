"""A feeder and a batcher on a real server, and a rollout service that tests play."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
from trainer_parts import make_group
from waiting import WAIT_S

from forage_proto.v1.trajectory_pb2 import GroundTruth, Prompt, Status, TrajectoryGroup
from forage_queue.streams.client import GROUP, StreamClient
from forage_queue.trainer.batcher import Batch, Batcher
from forage_queue.trainer.decoder import GroupDecoder
from forage_queue.trainer.feeder import Batches, Feeder
from forage_records.questions import Question
from forage_runtime.retries import Retries
from forage_runtime.settings import RedisSettings, Settings, load_settings
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health
from forage_trainer.data.tensors import has_equal_rewards
from forage_trajectory.codec import pack_group

SIZE = 3
PATIENCE_S = 0.05
"""Enough for a wait that must end without its groups: it looks at the stream once at least."""


@dataclass
class Bench:
    """A feeder and a batcher over one server; `answer` plays the rollout service."""

    settings: Settings
    streams: StreamClient
    stop: Stop
    health: Health
    feeder: Feeder
    batcher: Batcher
    version: int = 0

    def claim_prompts(self) -> list[Prompt]:
        return [entry.message for entry in self.streams.claim_prompts("probe", 1000, 0.05)]

    def answer(self, batch: int, position: int, version: int = 0, attempt: int = 0) -> TrajectoryGroup:
        return self.write(make_group(f"q/{batch}/{position}", [0.0, 1.0], batch, position, attempt, version))

    def reply(
        self, prompt: Prompt, rewards: Sequence[float], last: Status.ValueType = Status.STATUS_OK
    ) -> TrajectoryGroup:
        """Answer a prompt. last: status of the last trajectory."""
        group = make_group(prompt.group_uid, rewards, prompt.batch, prompt.position, prompt.attempt)
        group.trajectories[-1].status = last
        return self.write(group)

    def write(self, result: TrajectoryGroup) -> TrajectoryGroup:
        # As `issue` and `finish` do.
        table = self.streams.key(f"issued:trajectories:{result.batch}")
        self.streams._redis.hset(table, f"{result.position}/{result.attempt}", f"0-1 {result.group_uid}")
        self.streams._redis.xadd(self.streams.trajectories, {"p": pack_group(result).SerializeToString()})
        return result

    def acknowledge(self, batch: Batch) -> None:
        """What the trainer does once a checkpoint has the step, without the ledger."""
        ids = [entry.id for entry in batch.entries]
        self.streams.discard(self.streams.trajectories, ids)
        self.batcher.forget(ids, batch.number)

    def count_taken(self) -> int:
        """Count the groups that the trainer has claimed and not acknowledged."""
        return int(self.streams._redis.xpending(self.streams.trajectories, GROUP)["pending"])

    def list_uids(self, batch: int, timeout_s: float = WAIT_S) -> list[str]:
        return [g.group_uid for g in self.batcher.next_batch(batch, timeout_s).groups]


@pytest.fixture
def bench(redis_server: RedisSettings, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    monkeypatch.setattr("forage_queue.trainer.batcher._BLOCK_S", 0.02)

    def make(*overrides: str) -> Bench:
        settings = load_settings(
            None,
            [
                f"redis.url={redis_server.url}",
                f"data.train_batch_size={SIZE}",
                "trainer.total_training_steps=5",
                *overrides,
            ],
            {},
        )
        stop, health = Stop(), Health()
        retries = Retries(stop, health)
        retry = retries.redis
        streams = StreamClient(settings.redis, "bench", WAIT_S, decode=GroupDecoder(retries.disk))
        streams.create_groups()
        rows = tuple(Question("q", "train", i, (), GroundTruth(targets=[str(i)]), str(i)) for i in range(20))
        equal = partial(has_equal_rewards, estimator=settings.trainer.algorithm.adv_estimator)
        feeder = Feeder(settings, streams, Batches(rows, SIZE, 0), retry, equal)
        batcher = Batcher(streams, SIZE, settings.trainer, feeder, retry, health)
        return Bench(settings, streams, stop, health, feeder, batcher)

    return make
