"""Delivery on a real server when processes die, wait or lie: no group is lost, and none is deleted too early."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from feeding_bench import PATIENCE_S
from trainer_parts import make_group
from waiting import WAIT_S

from forage_proto.v1.trajectory_pb2 import GroundTruth, Policy, Prompt, Replica, TrajectoryGroup
from forage_queue.streams.client import Entry, StreamClient
from forage_queue.trainer.batcher import (
    LOST,
    MAX_STALE_ATTEMPTS,
    REJECTED,
    Batcher,
    BatchTimeoutError,
    StaleGroupsError,
    UnackedSteps,
)
from forage_queue.trainer.feeder import Batches, Feeder
from forage_records.questions import Question
from forage_runtime.errors import FencedError
from forage_runtime.retries import RedisRetry
from forage_runtime.settings import RedisSettings, Settings, load_settings
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health
from forage_trainer.data.tensors import has_equal_rewards
from forage_trajectory.codec import pack_group

SIZE = 3


@dataclass
class Trainer:
    """One process of the trainer, without its steps."""

    streams: StreamClient
    feeder: Feeder
    batcher: Batcher
    pending: UnackedSteps
    epoch: int

    def take_step(self, number: int, timeout_s: float = WAIT_S) -> list[str]:
        batch = self.batcher.next_batch(number, timeout_s)
        self.pending.add(batch, self.epoch, ())
        self.batcher.mark_consumed(number)
        return [group.group_uid for group in batch.groups]

    def acknowledge(self, until: int = 100) -> None:
        self.batcher.forget(self.pending.acknowledge(until), until)


class Rollout:
    """The other end of the streams."""

    def __init__(self, redis: RedisSettings) -> None:
        self.streams = StreamClient(redis, "test", WAIT_S)

    def claim(self) -> list[Entry[Prompt]]:
        return self.streams.claim_prompts("rollout", 1000, 0.05)

    def answer(self, entries: list[Entry[Prompt]], version: int | None = None) -> None:
        for entry in entries:
            asked = entry.message
            sampled = asked.min_policy_version if version is None else version
            reply = make_group(asked.group_uid, [0.0, 1.0], asked.batch, asked.position, asked.attempt, sampled)
            assert self.streams.finish(entry, pack_group(reply))


@pytest.fixture
def rollout(redis_server: RedisSettings) -> Rollout:
    return Rollout(redis_server)


@pytest.fixture
def start(redis_server: RedisSettings, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    monkeypatch.setattr("forage_queue.trainer.batcher.SILENCE_S", 0.0)  # every look that finds nothing is a silence
    monkeypatch.setattr("forage_queue.trainer.batcher._BLOCK_S", 0.02)

    def make(consumed: int = 0) -> Trainer:
        overrides = [f"redis.url={redis_server.url}", "run.id=test", f"data.train_batch_size={SIZE}"]
        settings: Settings = load_settings(None, [*overrides, "trainer.total_training_steps=9"], {})
        streams = StreamClient(settings.redis, "test", WAIT_S)
        streams.create_groups()
        epoch, health = streams.acquire_epoch(), Health()
        retry = RedisRetry(Stop(), health)
        rows = tuple(Question("q", "train", i, (), GroundTruth(targets=[str(i)]), str(i)) for i in range(40))
        equal = partial(has_equal_rewards, estimator=settings.trainer.algorithm.adv_estimator)
        feeder = Feeder(settings, streams, Batches(rows, SIZE, 0), retry, equal)
        batcher = Batcher(streams, SIZE, settings.trainer, feeder, retry, health)
        batcher.start(consumed)
        return Trainer(streams, feeder, batcher, UnackedSteps(streams, retry), epoch)

    return make


def test_groups_of_a_step_without_a_checkpoint_survive_a_silence(
    start: Callable[..., Trainer], rollout: Rollout
) -> None:
    trainer = start()
    trainer.feeder.issue_up_to_bound(0)
    asked = {(entry.message.batch, entry.message.position): entry for entry in rollout.claim()}
    rollout.answer([asked[1, p] for p in range(SIZE)])
    first = trainer.take_step(1)
    with pytest.raises(BatchTimeoutError):  # slow generation: several silences
        trainer.take_step(2, timeout_s=PATIENCE_S)
    again = start()  # no checkpoint was written
    assert again.take_step(1) == first
    again.acknowledge()
    assert again.streams.count_backlog(again.streams.trajectories) == 0


def test_groups_of_steps_after_a_checkpoint_survive_its_acknowledgement(
    start: Callable[..., Trainer], rollout: Rollout
) -> None:
    trainer = start()
    trainer.feeder.issue_up_to_bound(0)
    rollout.answer(rollout.claim())
    trainer.take_step(1)
    second = trainer.take_step(2)
    trainer.acknowledge(until=1)  # step 2 was taken while the checkpoint of step 1 became durable
    assert [step.step for step in trainer.pending.steps] == [2]
    again = start(consumed=1)
    assert again.take_step(2) == second
    again.acknowledge()
    assert {step: len(entry.group_uids) for step, entry in again.streams.read_ledger().items()} == {1: SIZE, 2: SIZE}


def test_a_superseded_trainer_can_change_nothing_and_ends(start: Callable[..., Trainer], rollout: Rollout) -> None:
    old = start()
    old.feeder.issue_up_to_bound(0)
    rollout.answer(rollout.claim())
    uids = old.take_step(1)
    batch = old.batcher.next_batch(2, WAIT_S)
    new = start()
    ids = [entry.id for entry in batch.entries]
    for change in (
        old.acknowledge,
        lambda: old.streams.discard(old.streams.trajectories, ids),
        lambda: old.streams.reclaim_groups(old.streams.trajectories, ()),
        lambda: old.feeder.issue(5, 0, 0, 0),
        lambda: old.streams.publish(Policy(version=1, epoch=old.epoch)),
        lambda: old.streams.close_replies(old.streams.trajectories, 1),
        old.streams.prune,
    ):
        with pytest.raises(FencedError, match="a later trainer has taken over"):
            change()
    with pytest.raises(FencedError):  # it notices while it waits
        old.take_step(3, timeout_s=3600)
    assert new.take_step(1) == uids
    assert len(new.take_step(2)) == SIZE


def test_groups_that_a_superseded_trainer_claimed_reach_its_successor(
    start: Callable[..., Trainer], rollout: Rollout
) -> None:
    old = start()
    old.feeder.issue_up_to_bound(0)
    entries = [entry for entry in rollout.claim() if entry.message.batch == 1]
    new = start()
    rollout.answer(entries)
    with pytest.raises(FencedError):
        old.batcher.next_batch(1, WAIT_S)  # it claims them, and then learns that it is over
    assert len(new.take_step(1)) == SIZE


def test_lost_groups_are_issued_again(start: Callable[..., Trainer], rollout: Rollout) -> None:
    trainer = start()
    trainer.feeder.issue_up_to_bound(0)
    entries = [entry for entry in rollout.claim() if entry.message.batch == 1]
    rollout.answer(entries)
    redis = trainer.streams._redis
    [(id, _)] = redis.xrange(trainer.streams.trajectories, count=1)
    redis.xdel(trainer.streams.trajectories, id)
    before = LOST._value.get()
    with pytest.raises(BatchTimeoutError):
        trainer.take_step(1, timeout_s=PATIENCE_S)
    [lost] = rollout.claim()
    assert (lost.message.position, lost.message.attempt) == (0, 1)
    rollout.answer([lost])
    assert trainer.take_step(1)[0] == entries[0].message.group_uid
    assert LOST._value.get() == before + 1


def test_a_prompt_in_progress_is_not_lost(start: Callable[..., Trainer], rollout: Rollout) -> None:
    trainer = start()
    trainer.feeder.issue_up_to_bound(0)
    entries = [entry for entry in rollout.claim() if entry.message.batch == 1]
    with pytest.raises(BatchTimeoutError):
        trainer.take_step(1, timeout_s=PATIENCE_S)
    assert rollout.claim() == []
    rollout.answer(entries)
    trainer.take_step(1)


def test_a_server_that_lost_everything_is_issued_the_batch_again(
    start: Callable[..., Trainer], rollout: Rollout
) -> None:
    trainer = start()
    trainer.feeder.issue_up_to_bound(0)
    trainer.streams._redis.flushall()
    with pytest.raises(BatchTimeoutError):
        trainer.take_step(1, timeout_s=PATIENCE_S)
    rollout.answer(rollout.claim())
    assert len(trainer.take_step(1)) == SIZE


def test_only_groups_that_were_issued_are_accepted(start: Callable[..., Trainer], rollout: Rollout) -> None:
    trainer = start()
    trainer.feeder.issue_up_to_bound(0)
    entries = [entry for entry in rollout.claim() if entry.message.batch == 1]
    issued = entries[0].message
    forged = [
        make_group("q/train/999/0", [0.0, 1.0], 1, 0),
        make_group(issued.group_uid, [0.0, 1.0], 1, 0, attempt=7),
        make_group(issued.group_uid, [0.0, 1.0], 1, SIZE),
        make_group(issued.group_uid, [0.0, 1.0], 77, 0),
    ]
    redis, stream = trainer.streams._redis, trainer.streams.trajectories
    for each in forged:
        redis.xadd(stream, {"p": pack_group(each).SerializeToString()})
    redis.xadd(stream, {"p": b"\xff\xff"})
    before = REJECTED._value.get()
    rollout.answer(entries)
    batch = trainer.batcher.next_batch(1, WAIT_S)
    assert [g.group_uid for g in batch.groups] == [entry.message.group_uid for entry in entries]
    assert REJECTED._value.get() == before + len(forged)
    assert redis.xlen(trainer.streams.key("rejected")) == len(forged) + 1
    assert redis.xlen(stream) == SIZE


def test_a_garbled_group_is_issued_again(start: Callable[..., Trainer], rollout: Rollout) -> None:
    trainer = start()
    trainer.feeder.issue_up_to_bound(0)
    garbled, *others = [entry for entry in rollout.claim() if entry.message.batch == 1]
    rollout.answer(others)
    redis = trainer.streams._redis
    redis.xack(trainer.streams.prompts, "forage", garbled.id)
    redis.xdel(trainer.streams.prompts, garbled.id)
    redis.xadd(trainer.streams.trajectories, {"p": b"\xff\xff"})
    with pytest.raises(BatchTimeoutError):
        trainer.take_step(1, timeout_s=PATIENCE_S)
    rollout.answer(rollout.claim())
    assert trainer.take_step(1)[0] == garbled.message.group_uid


def test_a_run_that_drops_everything_stops_with_a_sentence(start: Callable[..., Trainer], rollout: Rollout) -> None:
    trainer = start()
    trainer.feeder.issue_up_to_bound(5)
    for _ in range(MAX_STALE_ATTEMPTS):
        rollout.answer([entry for entry in rollout.claim() if entry.message.batch == 6], version=0)
        with pytest.raises(BatchTimeoutError):
            trainer.batcher.next_batch(6, PATIENCE_S)
    rollout.answer([entry for entry in rollout.claim() if entry.message.batch == 6], version=0)
    with pytest.raises(StaleGroupsError, match=r"batch 6, position 0: .*under version 0, older than 4.*policy_refused"):
        trainer.batcher.next_batch(6, WAIT_S)


def test_epochs_continue_after_a_lost_volume(redis_server: RedisSettings) -> None:
    client = StreamClient(redis_server, "test", WAIT_S)
    assert [client.acquire_epoch(), client.acquire_epoch()] == [1, 2]
    client._redis.flushall()
    assert client.acquire_epoch(floor=3) == 4
    client.publish(Policy(version=1, epoch=9))
    assert client.acquire_epoch() == 10


def test_replicas_and_consumers_that_are_gone_are_forgotten(redis_server: RedisSettings, tmp_path: Path) -> None:
    client = StreamClient(redis_server, "test", WAIT_S)
    client.create_groups()
    for name in ("gone", "alive"):
        client.acknowledge_policy(name, Replica(serving=Policy(version=1)))
    client._redis.zadd(client.key("alive"), {"gone": time.time() - 100})
    assert list(client.read_replicas()) == ["alive"]
    client.prune()
    assert client._redis.hkeys(client.key("replicas")) == [b"alive"]


def test_a_finished_run_leaves_nothing_on_its_streams(start: Callable[..., Trainer], rollout: Rollout) -> None:
    trainer = start()
    streams = trainer.streams
    trainer.feeder.issue_up_to_bound(0)
    asked = rollout.claim()
    first, *others = [entry for entry in asked if entry.message.batch == 1]
    rollout.answer(others)
    trainer.batcher._settings = trainer.batcher._settings.model_copy(update={"straggler_timeout_s": 0.05})
    assert len(trainer.take_step(1)) == SIZE - 1
    trainer.acknowledge()
    streams.issue(Prompt(group_uid="v", batch=1, reply_stream=streams.key("validation-after")))
    late, forged = pack_group(make_group("late", [0.0, 1.0], 1)), pack_group(make_group("forged", [1.0], 99))
    for _ in range(70):  # more than one claim takes
        streams._redis.xadd(streams.trajectories, {"p": forged.SerializeToString()})
    streams._redis.xadd(streams.trajectories, {"p": late.SerializeToString()})
    streams._redis.xadd(streams.trajectories, {"p": b"\xff" * 100_000})
    trainer.batcher.clear()
    kept = [entry.message.batch for entry in streams.read_prompts()]
    assert kept == [2] * SIZE, "what no ledger has is still asked for, as the run may be extended"
    assert not streams.finish(first, late), "nobody waits for the straggler"
    assert streams.count_backlog(streams.trajectories) == 0
    assert streams.measure_bytes(streams.key("rejected")) < 2_000_000
    rollout.answer([entry for entry in asked if entry.message.batch == 2])
    trainer.batcher._settings = trainer.batcher._settings.model_copy(update={"straggler_timeout_s": 0.0})
    assert len(trainer.take_step(2)) == SIZE
    trainer.acknowledge()
    trainer.batcher.clear()
    assert [streams.count_backlog(name) for name in (streams.prompts, streams.trajectories)] == [0, 0]


def test_an_answer_to_a_validation_that_has_ended_is_dropped(redis_server: RedisSettings) -> None:
    client = StreamClient(redis_server, "test", WAIT_S)
    stream = client.key("validation-after")
    client.create_groups()
    client.open_replies(stream, 4)
    client.issue(Prompt(group_uid="v", batch=4, reply_stream=stream))
    [entry] = client.claim_prompts("rollout", 1, 0.1)
    client.close_replies(stream, 4)
    assert not client.finish(entry, pack_group(TrajectoryGroup(group_uid="v", batch=4)))
    assert not client._redis.exists(stream)
    assert client.count_backlog(client.prompts) == 0


def test_a_validation_whose_stream_vanished_is_issued_again(redis_server: RedisSettings) -> None:
    client = StreamClient(redis_server, "test", WAIT_S)
    stream = client.key("validation-after")
    asked = Prompt(group_uid="v", batch=4, reply_stream=stream)
    client.open_replies(stream, 4)
    assert client.issue(asked)
    client.open_replies(stream, 4)
    assert not client.issue(asked), "a restart issues nothing twice"
    client._redis.delete(stream)
    client.open_replies(stream, 4)
    assert client.issue(asked)
