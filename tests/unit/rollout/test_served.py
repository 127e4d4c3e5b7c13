"""A dispatcher knows which policy every engine has reached, with a real Redis server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis
from dispatcher_bench import FIRST, Engine

from forage_common.settings import RedisSettings
from forage_common.streams.client import StreamClient
from forage_common.v1.trajectory_pb2 import Policy, Replica
from forage_rollout import served as module
from forage_rollout.served import ServedPolicies

SECOND, THIRD = Policy(version=2, epoch=1), Policy(version=3, epoch=1)
AT_ONCE_S = 0.5


class Bench:
    """The trainer, its engines, and what a dispatcher knows of them. asked: how often the engines themselves were."""

    def __init__(self, settings: RedisSettings) -> None:
        self.server = redis.Redis.from_url(settings.url)
        self.trainer = StreamClient(settings, "r", 2.0)
        self.running = [Engine(self.trainer, name) for name in ("one", "other")]
        self.asked = 0
        self.fails = False
        self.served = ServedPolicies(StreamClient(settings, "r", 2.0), asyncio.to_thread, self._ask)
        self.announce(FIRST)
        for engine in self.running:
            engine.serve(FIRST)

    async def _ask(self) -> dict[str, Replica]:
        self.asked += 1
        if self.fails:
            raise RuntimeError("no engine answers")
        return {engine.name: engine.word for engine in self.running}

    def announce(self, policy: Policy) -> None:
        self.trainer.publish(policy)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[ServedPolicies]:
        task = asyncio.create_task(self.served.watch())
        assert await self.served.wait_until_served(FIRST.version, 5.0)
        yield self.served
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
def bench(redis_server: RedisSettings, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(module, "WATCH_S", 1.0)
    return Bench(redis_server)


async def measure(waiting: asyncio.Future[bool]) -> float:
    began = time.monotonic()
    assert await waiting
    return time.monotonic() - began


async def test_a_prompt_waits_for_every_engine_and_goes_on_at_once_without_asking_any(bench: Bench) -> None:
    async with bench.watching() as served:
        bench.announce(SECOND)
        asked = bench.asked
        waiting = asyncio.ensure_future(served.wait_until_served(2, 10.0))
        bench.running[0].serve(SECOND)
        await asyncio.sleep(0.3)
        assert not waiting.done()
        bench.running[1].serve(SECOND)
        assert await measure(waiting) < AT_ONCE_S
        assert bench.asked == asked
        assert await served.wait_until_served(1, 0.0)
        assert not await served.wait_until_served(3, 0.2)


async def test_what_is_served_in_another_epoch_than_the_announced_one_does_not_count(bench: Bench) -> None:
    async with bench.watching() as served:
        bench.announce(Policy(version=1, epoch=2))
        for engine in bench.running:
            engine.serve(Policy(version=9, epoch=1))
        assert not await served.wait_until_served(1, 0.3)
        for engine in bench.running:
            engine.serve(Policy(version=1, epoch=2))
        assert await served.wait_until_served(1, 5.0)


async def test_an_engine_that_died_holds_nobody_back_for_long(bench: Bench) -> None:
    async with bench.watching() as served:
        bench.announce(SECOND)
        bench.running[0].serve(SECOND)
        del bench.running[1]
        taken = await measure(asyncio.ensure_future(served.wait_until_served(2, 10.0)))
        assert taken < module.DOUBT_S + AT_ONCE_S
        bench.announce(THIRD)
        bench.running[0].serve(THIRD)
        assert await measure(asyncio.ensure_future(served.wait_until_served(3, 10.0))) < module.DOUBT_S + AT_ONCE_S


async def test_an_engine_out_of_service_holds_nobody_back(bench: Bench) -> None:
    async with bench.watching() as served:
        bench.announce(SECOND)
        bench.running[0].serve(SECOND)
        waiting = asyncio.ensure_future(served.wait_until_served(2, 10.0))
        await asyncio.sleep(0.1)
        bench.running[1].serve(FIRST, out_of_service=True)
        assert await measure(waiting) < AT_ONCE_S
        bench.running[0].serve(SECOND, out_of_service=True)
        assert not await served.wait_until_served(1, 0.3), "there is no engine in service"


async def test_a_new_engine_counts_from_its_first_word(bench: Bench) -> None:
    async with bench.watching() as served:
        new = Engine(bench.trainer, "new")
        new.serve(FIRST)  # it says so before it is ready
        bench.announce(SECOND)
        for engine in bench.running:
            engine.serve(SECOND)
        waiting = asyncio.ensure_future(served.wait_until_served(2, 10.0))
        bench.running.append(new)
        await asyncio.sleep(module.DOUBT_S + 0.3)
        assert not waiting.done(), "it runs and serves an older policy"
        new.serve(SECOND)
        assert await measure(waiting) < AT_ONCE_S


async def test_an_engine_that_started_while_it_was_asked_for_counts_for_the_next_policy(bench: Bench) -> None:
    async with bench.watching() as served:
        new = Engine(bench.trainer, "new")
        new.serve(FIRST)
        bench.announce(SECOND)
        for engine in bench.running:
            engine.serve(SECOND)
        assert await served.wait_until_served(2, 5.0), "it was found not to run yet"
        bench.running.append(new)
        bench.announce(THIRD)
        for engine in bench.running[:2]:
            engine.serve(THIRD)
        assert not await served.wait_until_served(3, 0.5)
        new.serve(THIRD)
        assert await served.wait_until_served(3, 5.0)


async def test_an_engine_that_runs_and_that_redis_has_lost_counts(bench: Bench) -> None:
    async with bench.watching() as served:
        bench.server.flushall()
        assert not await served.wait_until_served(1, 0.3), "nothing is announced"
        bench.announce(Policy(version=2, epoch=5))
        bench.running[0].serve(Policy(version=2, epoch=5))
        waiting = asyncio.ensure_future(served.wait_until_served(2, 10.0))
        await asyncio.sleep(module.DOUBT_S + 0.3)
        assert not waiting.done(), "the other one runs, and was not heard of since"
        bench.running[1].serve(Policy(version=2, epoch=5))
        assert await measure(waiting) < 1.0 + AT_ONCE_S, "the new ids are lower than the one that was seen"


async def test_the_first_prompt_asks_the_engines_themselves(bench: Bench) -> None:
    bench.server.flushall()
    bench.announce(FIRST)
    bench.running[0].serve(FIRST)
    bench.running[1].word = Replica()  # a lost volume took its word with it, and it lags behind
    waiting = asyncio.ensure_future(bench.served.wait_until_served(1, 10.0))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    bench.running[1].word = Replica(serving=FIRST)
    assert await waiting


async def test_engines_that_do_not_answer_are_asked_again(bench: Bench) -> None:
    bench.fails = True
    waiting = asyncio.ensure_future(bench.served.wait_until_served(1, 20.0))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    assert bench.asked == 1, "they are not asked again and again"
    bench.fails = False
    assert await waiting


async def test_groups_share_one_look(bench: Bench, record_property: Callable[[str, Any], None]) -> None:
    bench.server.flushall()
    bench.announce(FIRST)
    bench.running = [Engine(bench.trainer, f"engine-{number}") for number in range(64)]
    for engine in bench.running:
        engine.serve(FIRST)
    async with bench.watching() as served:
        bench.announce(SECOND)
        asked = bench.asked
        bench.server.config_resetstat()
        waiting = [asyncio.ensure_future(served.wait_until_served(2, 30.0)) for _ in range(625)]
        for engine in bench.running:
            await asyncio.to_thread(engine.serve, SECOND)
        assert all(await asyncio.gather(*waiting))
        stats: Any = bench.server.info("commandstats")
        commands = {name.removeprefix("cmdstat_"): row["calls"] for name, row in stats.items()}
        # Of engines that ask Redis themselves, `acknowledge_policy` alone: XADD, HSET, ZADD and their like are parts.
        calls = (
            commands["xread"] + commands["fcall"] + commands["fcall_ro"] + (bench.asked - asked) * len(bench.running)
        )
        record_property("calls", calls)
        assert calls < 1000, "each group asked each engine: 40,000"
