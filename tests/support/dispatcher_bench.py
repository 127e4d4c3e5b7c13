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

from forage_common.settings import DataSettings, RedisSettings, RolloutSettings, Settings
from forage_common.streams.client import StreamClient
from forage_common.streams.packing import pack_group
from forage_common.v1.packed_pb2 import PackedGroup
from forage_common.v1.trajectory_pb2 import Policy, Prompt, Replica, Trajectory, TrajectoryGroup
from forage_rollout.concurrency import AskCounts
from forage_rollout.dispatcher import Dispatcher

FIRST = Policy(version=1, epoch=1)


def build_prompt(position: int, **fields: Any) -> Prompt:
    known = {"run_id": "r", "group_uid": f"g/{position}", "batch": 1, "position": position, "samples": 2}
    return Prompt(**{**known, **fields})


async def answer(asked: Prompt) -> TrajectoryGroup:
    trajectories = [Trajectory(id=f"r/{asked.group_uid}/{i}") for i in range(asked.samples)]
    return TrajectoryGroup(group_uid=asked.group_uid, position=asked.position, trajectories=trajectories)


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
    """A dispatcher at work, and the trainer's end of the streams."""

    def __init__(self, redis_settings: RedisSettings) -> None:
        fast = redis_settings.model_copy(update={"reclaim_idle_s": 0.6, "timeout_s": 2.0})
        rollout = RolloutSettings(max_groups_in_flight=4, n=2)
        self.settings = Settings(redis=fast, rollout=rollout, data=DataSettings(train_batch_size=2))
        self.trainer = StreamClient(fast, "r", 2.0)
        self.trainer.create_groups()
        self.trainer.publish(FIRST)
        self.engine = Engine(self.trainer)
        self.engine.serve(FIRST)
        self.running = [self.engine]
        self.asked = 0
        self.services = asyncio.Event()
        self.services.set()
        self.runs: list[str] = []

    def limit(self, trajectories: int) -> None:
        rollout = self.settings.rollout.model_copy(update={"max_trajectories_in_flight": trajectories})
        self.settings = self.settings.model_copy(update={"rollout": rollout})

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

        streams = StreamClient(self.settings.redis, "r", 1.0)
        name = consumer or uuid.uuid4().hex
        dispatcher = Dispatcher(
            self.settings, streams, name, run_counted, self.ask_engines, self.services.wait, ask_counts
        )
        task = asyncio.create_task(dispatcher.run())
        yield dispatcher
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

    async def take_groups(self, count: int, timeout_s: float = 20.0) -> list[TrajectoryGroup]:
        groups: list[TrajectoryGroup] = []
        deadline = time.monotonic() + timeout_s
        while len(groups) < count and time.monotonic() < deadline:
            taken = await asyncio.to_thread(self.trainer.claim_groups, self.trainer.trajectories, 64, 0.2)
            groups += [entry.message for entry in taken]
            self.trainer.discard(self.trainer.trajectories, [entry.id for entry in taken])
        return groups

    async def wait_until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not true():
                await asyncio.sleep(0.02)


@pytest.fixture
def server(redis_server: RedisSettings) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_server.url) as client:
        yield client


@pytest.fixture
def bench(redis_server: RedisSettings) -> Bench:
    return Bench(redis_server)
