"""An engine follows what the trainer announces, with a real Redis server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis
from structlog.testing import capture_logs

from forage_cli.runs.operations import read_history
from forage_common.settings import RedisSettings, RunSettings
from forage_common.streams.client import StreamClient
from forage_common.streams.history import open_history
from forage_common.v1.trajectory_pb2 import Policy
from forage_rollout.deployments import follower
from forage_rollout.deployments.follower import catch_up, follow_policy
from forage_rollout.weights.policy import PolicyError, is_newer

FIRST = Policy(version=1, epoch=1)


class Engine:
    """An engine that serves the policy that it last loaded. `gate` holds loads back."""

    dtype = "bfloat16"

    def __init__(self, serving: Policy | None = None) -> None:
        self.serving = serving
        self.refuse = False
        self.out_of_service = ""
        self.loads = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def load_policy(self, policy: Policy, allow_older: bool = False) -> float:
        self.loads += 1
        await self.gate.wait()
        if self.refuse or not (allow_older or is_newer(policy, self.serving)):
            raise PolicyError("altered")
        self.serving = policy
        self.out_of_service = ""
        return 0.0


class Bench:
    """The trainer's end of the streams, and engines that follow it."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._server = redis.Redis.from_url(settings.url)
        self.trainer = StreamClient(settings, "r", 2.0)
        self.trainer.publish(FIRST)

    def connect(self, run: str = "r") -> StreamClient:
        return StreamClient(self._settings, run, 1.0)

    def lose_volume(self) -> None:
        self._server.flushall()

    @asynccontextmanager
    async def following(self, engine: Engine) -> AsyncIterator[None]:
        task = asyncio.create_task(follow_policy(self.connect(), engine, "replica"))
        yield
        task.cancel()
        await asyncio.wait([task])

    async def until_acknowledged(self, policy: Policy) -> None:
        await until(lambda: self.trainer.read_replicas().get("replica") == policy)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.02)


@pytest.fixture
def bench(redis_server: RedisSettings, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(follower, "RETRY_INTERVAL_S", 0.05)
    monkeypatch.setattr(follower, "POLL_INTERVAL_S", 0.02)
    return Bench(redis_server)


async def test_announced_policies_are_loaded_and_acknowledged(bench: Bench) -> None:
    engine = Engine()
    async with bench.following(engine):
        await bench.until_acknowledged(FIRST)
        engine.refuse = True
        bench.trainer.publish(Policy(version=2, epoch=1))
        await until(lambda: engine.loads > 2)
        assert engine.serving == FIRST
        engine.refuse = False
        await bench.until_acknowledged(Policy(version=2, epoch=1))
        bench.trainer.publish(Policy(version=1, epoch=2))
        await bench.until_acknowledged(Policy(version=1, epoch=2))


async def test_what_an_engine_computes_in_is_declared_before_it_serves_and_after_a_lost_volume(bench: Bench) -> None:
    engine = Engine(FIRST)
    assert bench.trainer.read_dtype() == ""
    await catch_up(bench.connect(), engine)
    assert bench.trainer.read_dtype() == "bfloat16"
    async with bench.following(engine):
        await bench.until_acknowledged(FIRST)
        bench.lose_volume()
        assert bench.trainer.read_dtype() == ""
        bench.trainer.publish(Policy(version=2, epoch=1))
        await bench.until_acknowledged(Policy(version=2, epoch=1))
        assert bench.trainer.read_dtype() == "bfloat16"


async def test_every_load_is_recorded_with_its_result(bench: Bench, tmp_path: Path) -> None:
    run = RunSettings(id="r", dir=tmp_path, record_history=True)
    client, engine = bench.connect(), Engine()
    client.history = open_history(run, "engine")
    await catch_up(client, engine)
    engine.refuse = True
    bench.trainer.publish(Policy(version=2, epoch=1))
    task = asyncio.create_task(follow_policy(client, engine, "replica"))
    await until(lambda: engine.loads > 1)
    engine.refuse = False
    await bench.until_acknowledged(Policy(version=2, epoch=1))
    task.cancel()
    await asyncio.wait([task])
    loads = [(load["version"], load["epoch"], load.result) for load in read_history(run.folder).select("load")]
    assert (loads[0], loads[1], loads[-1]) == ((1, 1, "ok"), (2, 1, "error"), (2, 1, "ok"))


async def test_an_announcement_with_a_lower_epoch_is_loaded_with_a_warning(bench: Bench) -> None:
    last = Policy(version=20, epoch=3)
    bench.trainer.publish(last)
    engine = Engine()
    with capture_logs() as logs:
        async with bench.following(engine):
            await bench.until_acknowledged(last)
            bench.lose_volume()
            bench.trainer.publish(Policy(version=18, epoch=1))
            await bench.until_acknowledged(Policy(version=18, epoch=1))
            bench.trainer.publish(Policy(version=19, epoch=1))
            await bench.until_acknowledged(Policy(version=19, epoch=1))
    warnings = [entry for entry in logs if entry["event"] == "older_policy_loaded"]
    assert [(entry["log_level"], entry["announced"].split(" at")[0]) for entry in warnings] == [
        ("warning", "policy version 18 of epoch 1")
    ]


async def test_other_weights_under_the_same_version_and_epoch_are_loaded(bench: Bench) -> None:
    engine = Engine(FIRST)
    async with bench.following(engine):
        other = Policy(version=1, epoch=1, digest="0" * 64)
        bench.lose_volume()
        bench.trainer.publish(other)
        await bench.until_acknowledged(other)
        assert engine.serving == other


async def test_an_unchanged_announcement_does_not_revert_what_was_loaded_by_hand(bench: Bench) -> None:
    engine = Engine()
    async with bench.following(engine):
        await bench.until_acknowledged(FIRST)
        by_hand = Policy(version=9, epoch=1)
        await engine.load_policy(by_hand)
        await bench.until_acknowledged(by_hand)
        await asyncio.sleep(0.2)
        assert (engine.serving, engine.loads) == (by_hand, 2)
        bench.trainer.publish(Policy(version=2, epoch=1))
        await bench.until_acknowledged(Policy(version=2, epoch=1))


async def test_a_policy_loaded_by_hand_takes_the_place_of_an_announced_one_that_is_refused(bench: Bench) -> None:
    engine = Engine(FIRST)
    engine.refuse = True
    bench.trainer.publish(Policy(version=2, epoch=1))
    async with bench.following(engine):
        await until(lambda: engine.out_of_service == "altered")
        by_hand = Policy(version=3, epoch=1)
        engine.serving, engine.out_of_service, engine.refuse = by_hand, "", False
        await bench.until_acknowledged(by_hand)
        loads = engine.loads
        await asyncio.sleep(0.3)
        assert (engine.serving, engine.out_of_service) == (by_hand, "")
        assert engine.loads <= loads + 1


async def test_the_served_policy_is_acknowledged_again_and_again_also_during_a_load(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "HEARTBEAT_INTERVAL_S", 0.1)
    engine = Engine()

    async def until_heartbeat() -> None:
        bench.lose_volume()
        await bench.until_acknowledged(FIRST)

    async with bench.following(engine):
        await bench.until_acknowledged(FIRST)
        await until_heartbeat()
        engine.gate.clear()  # it waits for a long group
        bench.trainer.publish(Policy(version=2, epoch=1))
        await until(lambda: engine.loads == 2)
        await until_heartbeat()
        await until_heartbeat()
        engine.gate.set()
        await bench.until_acknowledged(Policy(version=2, epoch=1))


async def test_an_engine_that_cannot_load_the_announced_policy_is_out_of_service_until_it_can(bench: Bench) -> None:
    engine = Engine(FIRST)
    engine.refuse = True
    async with bench.following(engine):
        await asyncio.sleep(0.3)
        assert engine.out_of_service == "", "nothing else was announced"
        bench.trainer.publish(Policy(version=2, epoch=1))
        await until(lambda: engine.out_of_service == "altered")
        engine.refuse = False
        await until(lambda: engine.out_of_service == "" and engine.serving == Policy(version=2, epoch=1))


async def test_a_new_engine_is_ready_once_it_serves_the_announced_policy(bench: Bench) -> None:
    engine = Engine()
    await catch_up(bench.connect(), engine)
    assert engine.serving == FIRST


async def test_a_new_engine_is_ready_with_its_own_weights_when_no_policy_is_announced(bench: Bench) -> None:
    engine = Engine()
    await catch_up(bench.connect("another-run"), engine)
    assert (engine.serving, engine.out_of_service) == (None, "")


async def test_a_new_engine_that_cannot_load_the_announced_policy_starts_out_of_service(bench: Bench) -> None:
    engine = Engine()
    engine.refuse = True
    await catch_up(bench.connect(), engine, 0.3)
    assert (engine.serving, engine.out_of_service) == (None, "altered")
