"""An engine sleeps in the trainer's shifts at shared GPUs, and wakes in order, with a real Redis server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import redis
from waiting import wait_until_async as until

from forage_proto.v1.trajectory_pb2 import Policy, Replica, Shift
from forage_queue.rollout import lease_watch
from forage_queue.rollout.lease_watch import LeaseWatch
from forage_queue.streams.client import StreamClient
from forage_runtime.settings import RedisSettings
from forage_weights.announcement import PolicyError
from forage_weights.rollout import follower
from forage_weights.rollout.follower import Follower

FIRST, SECOND, THIRD = (Policy(version=version, epoch=1) for version in (1, 2, 3))


class Engine:
    """An engine that notes what is asked of it; `gate` holds loads back."""

    dtype = "bfloat16"
    out_of_service, difference = "", None

    def __init__(self, drains: bool = False) -> None:
        self.serving: Policy | None = None
        self.drains = drains
        self.is_asleep = self.refuse = self.is_loading = False
        self.done: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def fall_asleep(self) -> None:
        self.is_asleep = True
        self.done.append("sleep")

    async def wake_weights(self) -> None:
        self.done.append("wake_weights")

    async def wake_up(self) -> None:
        self.is_asleep = False
        self.done.append("wake_up")

    async def load_policy(self, policy: Policy, allow_older: bool = False) -> float:
        self.is_loading = True
        await self.gate.wait()
        if self.refuse:
            raise PolicyError("altered")
        self.serving = policy
        self.done.append(f"load {policy.version}")
        return 0.0


class Bench:
    """The trainer's end of the streams, and one engine."""

    def __init__(self, settings: RedisSettings) -> None:
        self.settings = settings
        self.server = redis.Redis.from_url(settings.url)
        self.trainer = StreamClient(settings, "r", 60.0)
        self.trainer.acquire_epoch()
        self.number = 0
        self.reads = 0

    def connect(self) -> StreamClient:
        """A client of an engine, whose looks at the shift are counted."""
        client = StreamClient(self.settings, "r", 60.0)
        read = client.read_shift

        def read_and_count() -> Shift | None:
            found = read()
            self.reads += 1
            return found

        client.read_shift = read_and_count  # type: ignore[method-assign]
        return client

    async def until_read(self) -> None:
        """Return once the shift was read after this call, and acted upon."""
        before = self.reads
        await until(lambda: self.reads > before + 2)

    def give(self, is_trainers: bool) -> Shift:
        self.number += 1
        shift = Shift(number=self.number, is_trainers=is_trainers)
        self.trainer.set_shift(shift)
        return shift

    @property
    def word(self) -> Replica:
        return self.trainer.read_replicas().get("replica", Replica())

    def says_asleep(self, shift: Shift) -> bool:
        return (self.word.asleep.epoch, self.word.asleep.number) == (shift.epoch, shift.number)

    @asynccontextmanager
    async def following(self, engine: Engine) -> AsyncIterator[None]:
        client = self.connect()
        task = asyncio.create_task(Follower(client, engine, "replica", LeaseWatch(client, "replica")).follow())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])


@pytest.fixture
def bench(redis_server: RedisSettings, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(follower, "RETRY_INTERVAL_S", 0.05)
    monkeypatch.setattr(follower, "POLL_INTERVAL_S", 0.02)
    monkeypatch.setattr(follower, "GIVE_WAY_INTERVAL_S", 0.05)
    monkeypatch.setattr(follower, "WATCH_S", 0.1)
    monkeypatch.setattr(lease_watch, "LOOK_S", 0.1)
    return Bench(redis_server)


class Clock:
    """What engines measure a trainer's silence by."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lease_watch, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


async def test_an_engine_sleeps_says_so_and_takes_memory_again_in_an_order_that_fits(bench: Bench) -> None:
    engine = Engine()
    bench.trainer.publish(FIRST)
    async with bench.following(engine):
        await until(lambda: engine.serving == FIRST)
        shift = bench.give(True)
        await until(lambda: bench.says_asleep(shift))
        bench.trainer.publish(SECOND)
        again = bench.give(True)  # a trainer that was started again
        await until(lambda: bench.says_asleep(again))
        assert engine.serving == FIRST, "nothing is loaded into an engine that sleeps"
        bench.give(False)
        await until(lambda: not engine.is_asleep and bench.word.serving == SECOND)
        assert not bench.word.HasField("asleep")
    assert engine.done == ["load 1", "sleep", "sleep", "wake_weights", "load 2", "wake_up"]


async def test_in_drain_mode_groups_can_end_before_the_next_policy_is_loaded(bench: Bench) -> None:
    engine = Engine(drains=True)
    bench.trainer.publish(FIRST)
    async with bench.following(engine):
        shift = bench.give(True)
        await until(lambda: bench.says_asleep(shift))
        engine.done.clear()
        bench.trainer.publish(SECOND)
        bench.give(False)
        await until(lambda: engine.serving == SECOND)
    assert engine.done == ["wake_weights", "wake_up", "load 2"]


async def test_an_engine_that_cannot_load_the_policy_wakes_with_the_old_one(bench: Bench) -> None:
    engine = Engine()
    bench.trainer.publish(FIRST)
    async with bench.following(engine):
        await until(lambda: engine.serving == FIRST)
        shift = bench.give(True)
        await until(lambda: bench.says_asleep(shift))
        engine.refuse = True
        bench.trainer.publish(SECOND)
        bench.give(False)
        await until(lambda: not engine.is_asleep and bench.word.refused == SECOND)
        assert bench.word.serving == FIRST


async def test_the_trainers_shift_ends_a_load(bench: Bench) -> None:
    engine = Engine()
    bench.trainer.publish(FIRST)
    async with bench.following(engine):
        await until(lambda: engine.serving == FIRST)
        engine.gate.clear()
        bench.trainer.publish(SECOND)
        engine.is_loading = False
        await until(lambda: engine.is_loading)
        shift = bench.give(True)
        await until(lambda: bench.says_asleep(shift))
        engine.gate.set()
        bench.give(False)
        await until(lambda: engine.serving == SECOND and not engine.is_asleep)


async def test_an_engine_that_starts_is_known_before_it_looks_and_takes_no_memory_in_the_trainers_shift(
    bench: Bench,
) -> None:
    own = LeaseWatch(bench.connect(), "replica")
    shift = bench.give(True)
    starting = asyncio.create_task(own.wait_for_engines())
    await until(lambda: bench.says_asleep(shift))
    assert bench.word.out_of_service, "prompts do not wait for it"
    later = bench.give(True)
    await until(lambda: bench.says_asleep(later))
    assert not starting.done()
    bench.give(False)
    await starting
    last = bench.give(True)
    with own.starting():
        await until(lambda: not bench.word.HasField("asleep"))
        assert not bench.says_asleep(last), "it uses memory: the trainer has to wait for it"
    engine = Engine()
    client = bench.connect()
    caught_up = asyncio.create_task(Follower(client, engine, "replica", own).catch_up())
    await until(lambda: bench.says_asleep(last))
    assert not caught_up.done()
    bench.trainer.publish(FIRST)
    bench.give(False)
    await caught_up
    assert (engine.serving, bench.word.serving, bench.word.out_of_service) == (FIRST, FIRST, False)


async def test_without_a_trainer_an_engine_starts_at_once(bench: Bench) -> None:
    await LeaseWatch(bench.connect(), "replica").wait_for_engines()


@pytest.mark.parametrize("loses_data", [False, True])
async def test_engines_wake_after_a_trainer_that_is_silent_but_not_after_one_that_lives(
    bench: Bench, clock: Clock, loses_data: bool
) -> None:
    engine = Engine()
    async with bench.following(engine):
        shift = bench.give(True)
        await until(lambda: bench.says_asleep(shift))
        for beat in range(1, 4):
            clock.now += 0.8 * lease_watch.LEASE_S
            alive = Shift(epoch=shift.epoch, number=shift.number, is_trainers=True, beat=beat)
            assert bench.trainer.replace_shift(shift, alive)
            shift = alive
            await bench.until_read()
            assert engine.is_asleep
        if loses_data:
            bench.server.flushall()
            clock.now += 0.8 * lease_watch.LEASE_S
            await bench.until_read()
            assert engine.is_asleep, "the trainer may live, and says so again"
        clock.now += 1.1 * lease_watch.LEASE_S
        await until(lambda: not engine.is_asleep)
    # Engines have ended the trainer's shift: the engine may wake before the one that did it logs trainer_is_silent.
    assert loses_data or bench.trainer.read_shift() == Shift(epoch=shift.epoch, number=shift.number + 1)
    assert not bench.trainer.replace_shift(shift, shift), "the trainer learns that it has lost its shift"


async def test_engines_sleep_on_while_redis_is_away(
    bench: Bench, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forage_runtime.errors import UnavailableError

    own = LeaseWatch(bench.connect(), "replica")
    bench.give(True)
    assert await own.read_trainers() is not None

    def fail() -> Shift:
        raise UnavailableError("away")

    with monkeypatch.context() as patch:
        patch.setattr(own._streams, "read_shift", fail)
        for _ in range(3):
            clock.now += 0.8 * lease_watch.LEASE_S
            with pytest.raises(UnavailableError):
                await own.read_trainers()
    assert await own.read_trainers() is not None, "the trainer could give no sign of life either"
