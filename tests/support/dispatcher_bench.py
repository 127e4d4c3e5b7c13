"""A dispatcher at work on a real Redis server, and the trainer's end of the streams."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis
from waiting import WAIT_S, wait_until_async

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_proto.v1.trajectory_pb2 import Policy, Prompt, Replica, Trajectory, TrajectoryGroup
from forage_queue.rollout import dispatcher
from forage_queue.rollout.concurrency import AskCounts
from forage_queue.rollout.dispatcher import Dispatcher
from forage_queue.streams.client import StreamClient
from forage_runtime.settings import DataSettings, RedisSettings, RolloutSettings, Settings
from forage_trajectory.codec import pack_group, unpack_group

FIRST = Policy(version=1, epoch=1)


def build_prompt(position: int, **fields: Any) -> Prompt:
    known = {"run_id": "r", "group_uid": f"g/{position}", "batch": 1, "position": position, "samples": 2}
    return Prompt(**{**known, **fields})


async def answer(asked: Prompt) -> TrajectoryGroup:
    trajectories = [Trajectory(id=f"r/{asked.group_uid}/{i}") for i in range(asked.samples)]
    return TrajectoryGroup(group_uid=asked.group_uid, position=asked.position, trajectories=trajectories)


async def take_groups(trainer: StreamClient, count: int, timeout_s: float = WAIT_S) -> list[TrajectoryGroup]:
    """Take groups off the stream until there are so many, or the time is over."""
    groups: list[TrajectoryGroup] = []
    deadline = time.monotonic() + timeout_s
    while len(groups) < count and time.monotonic() < deadline:
        taken = await asyncio.to_thread(trainer.claim_groups, trainer.trajectories, 64, 0.1)
        groups += [unpack_group(entry.message.read_packed()) for entry in taken]
        trainer.discard(trainer.trajectories, [entry.id for entry in taken])
    return groups


class Engine:
    """An engine that says what it serves, in Redis and where it is asked."""

    def __init__(self, streams: StreamClient, name: str = "engine") -> None:
        self.name = name
        self._streams = streams
        self.word = Replica()

    def serve(self, policy: Policy, **fields: Any) -> None:
        self.word = Replica(serving=policy, **fields)
        self._streams.acknowledge_policy(self.name, self.word)


class Bench:
    """A dispatcher at work, and the trainer's end of the streams.

    No worker is so slow that another one reclaims its prompts, unless `reclaim_soon` was called.
    """

    def __init__(self, redis_settings: RedisSettings) -> None:
        patient = redis_settings.model_copy(update={"reclaim_idle_s": 300.0, "timeout_s": 60.0})
        rollout = RolloutSettings(max_groups_in_flight=4, n=2)
        self.settings = Settings(redis=patient, rollout=rollout, data=DataSettings(train_batch_size=2))
        self.trainer = StreamClient(patient, "r", 60.0)
        self.trainer.create_groups()
        self.trainer.publish(FIRST)
        self.engine = Engine(self.trainer)
        self.engine.serve(FIRST)
        self.running = [self.engine]
        self.asked = 0
        self.services = asyncio.Event()
        self.services.set()
        self.is_waiting_for_services = False
        self.runs: list[str] = []

    def limit(self, trajectories: int) -> None:
        rollout = self.settings.rollout.model_copy(update={"max_trajectories_in_flight": trajectories})
        self.settings = self.settings.model_copy(update={"rollout": rollout})

    def reclaim_soon(self) -> None:
        """For those who wait for it: prompts of a worker that is gone are reclaimed after a moment."""
        self._update_redis(reclaim_idle_s=0.6)

    def give_up_soon(self) -> None:
        """For those who wait for it: a call of a server that hangs fails after a moment."""
        self._update_redis(timeout_s=1.0)

    def _update_redis(self, **changes: float) -> None:
        changed = self.settings.redis.model_copy(update=changes)
        self.settings = self.settings.model_copy(update={"redis": changed})

    async def _wait_for_services(self) -> None:
        self.is_waiting_for_services = True
        await self.services.wait()
        self.is_waiting_for_services = False

    async def ask_engines(self) -> dict[str, Replica]:
        self.asked += 1
        return {engine.name: engine.word for engine in self.running}

    @asynccontextmanager
    async def run(
        self,
        run: Callable[[Prompt], Awaitable[TrajectoryGroup]] = answer,
        consumer: str = "",
        ask_counts: AskCounts | None = None,
    ) -> AsyncIterator[Dispatcher]:
        async def run_counted(asked: Prompt) -> PackedGroup:
            self.runs.append(asked.group_uid)
            return pack_group(await run(asked))

        streams = StreamClient(self.settings.redis, "r", self.settings.redis.timeout_s)
        name = consumer or uuid.uuid4().hex
        dispatcher = Dispatcher(
            self.settings, streams, name, run_counted, self.ask_engines, self._wait_for_services, ask_counts
        )
        task = asyncio.create_task(dispatcher.run())
        try:
            yield dispatcher
        finally:
            task.cancel()
            await asyncio.wait([task])

    @asynccontextmanager
    async def run_one(self) -> AsyncIterator[tuple[Dispatcher, asyncio.Event]]:
        """Run one prompt, whose group is finished once the event is set."""
        release = asyncio.Event()

        async def wait(asked: Prompt) -> TrajectoryGroup:
            await release.wait()
            return await answer(asked)

        self.trainer.issue(build_prompt(0))
        async with self.run(wait) as dispatcher:
            await self.wait_until(lambda: self.runs == ["g/0"])
            yield dispatcher, release

    async def take_groups(self, count: int, timeout_s: float = WAIT_S) -> list[TrajectoryGroup]:
        return await take_groups(self.trainer, count, timeout_s)

    async def wait_until(self, true: Callable[[], bool]) -> None:
        await wait_until_async(true)


@pytest.fixture
def server(redis_server: RedisSettings) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_server.url) as client:
        yield client


@pytest.fixture
def bench(redis_server: RedisSettings, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(dispatcher, "RETRY_INTERVAL_S", 0.05)
    # A thread that reads may outlive its test by so long.
    monkeypatch.setattr(dispatcher, "BLOCK_S", 0.1)
    monkeypatch.setattr(dispatcher, "WATCH_S", 0.2)
    monkeypatch.setattr(dispatcher, "LIVELY_S", 3600)  # engines here give one sign of life
    return Bench(redis_server)
