"""A dispatcher knows which policy every engine has reached, with a real Redis server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis
from dispatcher_bench import FIRST, Engine
from waiting import wait_until_async

from forage_proto.v1.trajectory_pb2 import Policy, Replica
from forage_queue.rollout import dispatcher as module
from forage_queue.rollout.dispatcher import PolicyProgress
from forage_queue.streams.client import StreamClient
from forage_runtime.settings import RedisSettings

SECOND, THIRD = Policy(version=2, epoch=1), Policy(version=3, epoch=1)
NEVER_S = 3600.0
"""A limit that ends nothing here."""


class Bench:
    """The trainer, its engines, and what a dispatcher knows of them. asked: how often the engines themselves were."""

    def __init__(self, settings: RedisSettings) -> None:
        self.server = redis.Redis.from_url(settings.url)
        settings = settings.model_copy(update={"timeout_s": 2 * NEVER_S})
        self.trainer = StreamClient(settings, "r", 60.0)
        self.running = [Engine(self.trainer, name) for name in ("one", "other")]
        self.asked = 0
        self.fails = False
        self.served = PolicyProgress(StreamClient(settings, "r", 60.0), asyncio.to_thread, self._ask)
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

    def wait_for(self, version: int) -> asyncio.Future[bool]:
        return asyncio.ensure_future(self.served.wait_until_served(version, NEVER_S))

    async def until_asked(self, times: int) -> None:
        """Return once the engines were asked so often, and all but the last of their answers were read."""
        asked = self.asked
        await wait_until_async(lambda: self.asked >= asked + times)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[PolicyProgress]:
        task = asyncio.create_task(self.served.watch())
        try:
            assert await self.wait_for(FIRST.version)
            yield self.served
        finally:
            task.cancel()
            await asyncio.wait([task])
            self.running[0].serve(FIRST)  # a last change, which ends the thread that waits for one


@pytest.fixture(autouse=True)
def paces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that lag behind are asked at once; changes that were missed are found soon."""
    monkeypatch.setattr(module, "WATCH_S", 0.2)
    monkeypatch.setattr(module, "DOUBT_S", 0.05)
    monkeypatch.setattr(module, "LIVELY_S", 3600)  # they give no other sign of life


@pytest.fixture
def bench(redis_server: RedisSettings) -> Bench:
    return Bench(redis_server)


@pytest.fixture
def changes_alone(paces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a change is a reason to read what is served: neither doubt nor the time."""
    for name in ("WATCH_S", "DOUBT_S", "MAX_DOUBT_S"):
        monkeypatch.setattr(module, name, NEVER_S)


@pytest.mark.usefixtures("changes_alone")
async def test_a_prompt_waits_for_every_engine_and_goes_on_at_once_without_asking_any(bench: Bench) -> None:
    async with bench.watching() as served:
        bench.announce(SECOND)
        asked = bench.asked
        waiting = bench.wait_for(2)
        bench.running[0].serve(SECOND)
        await wait_until_async(lambda: served._listed["one"].serving == SECOND)
        assert not waiting.done()
        bench.running[1].serve(SECOND)
        assert await waiting
        assert bench.asked == asked
        assert await served.wait_until_served(1, 0.0)
        assert not await served.wait_until_served(3, 0.05)


async def test_what_is_served_in_another_epoch_than_the_announced_one_does_not_count(bench: Bench) -> None:
    async with bench.watching() as served:
        bench.announce(Policy(version=1, epoch=2))
        for engine in bench.running:
            engine.serve(Policy(version=9, epoch=1))
        assert not await served.wait_until_served(1, 0.2)
        for engine in bench.running:
            engine.serve(Policy(version=1, epoch=2))
        assert await bench.wait_for(1)


async def test_an_engine_that_died_holds_nobody_back_for_long(bench: Bench) -> None:
    async with bench.watching():
        bench.announce(SECOND)
        bench.running[0].serve(SECOND)
        del bench.running[1]
        asked = bench.asked
        assert await bench.wait_for(2)
        assert bench.asked > asked, "it was missed because the others were asked"
        bench.announce(THIRD)
        bench.running[0].serve(THIRD)
        assert await bench.wait_for(3)


@pytest.mark.usefixtures("changes_alone")
async def test_an_engine_out_of_service_holds_nobody_back(bench: Bench) -> None:
    async with bench.watching() as served:
        bench.announce(SECOND)
        bench.running[0].serve(SECOND)
        waiting = bench.wait_for(2)
        await wait_until_async(lambda: served._listed["one"].serving == SECOND)
        assert not waiting.done()
        bench.running[1].serve(FIRST, out_of_service=True)
        assert await waiting
        bench.running[0].serve(SECOND, out_of_service=True)
        assert not await served.wait_until_served(1, 0.2), "there is no engine in service"


async def test_a_new_engine_counts_from_its_first_word(bench: Bench) -> None:
    async with bench.watching():
        new = Engine(bench.trainer, "new")
        new.serve(FIRST)  # it says so before it is ready
        bench.announce(SECOND)
        for engine in bench.running:
            engine.serve(SECOND)
        bench.running.append(new)
        waiting = bench.wait_for(2)
        await bench.until_asked(2)
        assert not waiting.done(), "it runs and serves an older policy"
        new.serve(SECOND)
        assert await waiting


async def test_an_engine_that_started_while_it_was_asked_for_counts_for_the_next_policy(bench: Bench) -> None:
    async with bench.watching():
        new = Engine(bench.trainer, "new")
        new.serve(FIRST)
        bench.announce(SECOND)
        for engine in bench.running:
            engine.serve(SECOND)
        assert await bench.wait_for(2), "it was found not to run yet"
        bench.running.append(new)
        bench.announce(THIRD)
        for engine in bench.running[:2]:
            engine.serve(THIRD)
        waiting = bench.wait_for(3)
        await bench.until_asked(2)
        assert not waiting.done()
        new.serve(THIRD)
        assert await waiting


async def test_an_engine_that_runs_and_that_redis_has_lost_counts(bench: Bench) -> None:
    async with bench.watching() as served:
        bench.server.flushall()
        assert not await served.wait_until_served(1, 0.2), "nothing is announced"
        bench.announce(Policy(version=2, epoch=5))
        bench.running[0].serve(Policy(version=2, epoch=5))
        waiting = bench.wait_for(2)
        await bench.until_asked(2)
        assert not waiting.done(), "the other one runs, and was not heard of since"
        bench.running[1].serve(Policy(version=2, epoch=5))
        assert await waiting, "the new ids are lower than the one that was seen"


async def test_the_first_prompt_asks_the_engines_themselves(bench: Bench) -> None:
    bench.server.flushall()
    bench.announce(FIRST)
    bench.running[0].serve(FIRST)
    bench.running[1].word = Replica()  # a lost volume took its word with it, and it lags behind
    waiting = bench.wait_for(1)
    await bench.until_asked(2)
    assert not waiting.done()
    bench.running[1].word = Replica(serving=FIRST)
    assert await waiting


async def test_engines_that_do_not_answer_are_asked_again(bench: Bench) -> None:
    bench.fails = True
    waiting = bench.wait_for(1)
    await bench.until_asked(2)
    assert not waiting.done()
    bench.fails = False
    assert await waiting


@pytest.mark.usefixtures("changes_alone")
async def test_engines_that_do_not_answer_are_not_asked_again_and_again(bench: Bench) -> None:
    bench.fails = True
    waiting = bench.wait_for(1)
    await bench.until_asked(1)
    await asyncio.sleep(0.1)
    assert (bench.asked, waiting.done()) == (1, False)
    waiting.cancel()


@pytest.mark.usefixtures("changes_alone")
async def test_groups_share_one_look(bench: Bench, record_property: Callable[[str, Any], None]) -> None:
    bench.server.flushall()
    bench.announce(FIRST)
    bench.running = [Engine(bench.trainer, f"engine-{number}") for number in range(64)]
    for engine in bench.running:
        engine.serve(FIRST)
    async with bench.watching():
        bench.announce(SECOND)
        asked = bench.asked
        bench.server.config_resetstat()
        waiting = [bench.wait_for(2) for _ in range(625)]
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
