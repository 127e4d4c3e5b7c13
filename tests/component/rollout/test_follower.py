"""An engine follows what the trainer announces, with a real Redis server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis
from key_pairs import make_keys, make_signatures
from policy_files import Publications
from structlog.testing import capture_logs
from waiting import wait_until_async as until

from forage_proto.v1.trajectory_pb2 import Policy, Replica
from forage_queue.checker.operations import read_history
from forage_queue.streams.client import StreamClient
from forage_queue.streams.history import open_history
from forage_runtime.settings import RedisSettings, RunSettings, Settings
from forage_weights.announcement import PolicyError, sign_announcement
from forage_weights.rollout import follower
from forage_weights.rollout.follower import Follower
from forage_weights.rollout.policy import is_newer
from forage_weights.rollout.preparation import hold_policy, open_cache

FIRST = Policy(version=1, epoch=1)
NEVER_S = 3600.0
"""A limit that ends nothing here."""


class Engine:
    """An engine that serves the policy that it last loaded. `gate` holds loads back."""

    dtype, difference = "bfloat16", None

    def __init__(self, serving: Policy | None = None) -> None:
        self.serving = serving
        self.refuse = False
        self.out_of_service = ""
        self.loads = 0
        self.loaded: list[Policy] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def load_policy(self, policy: Policy, allow_older: bool = False) -> float:
        self.loads += 1
        await self.gate.wait()
        if self.refuse or not (allow_older or is_newer(policy, self.serving)):
            raise PolicyError("altered")
        self.serving = policy
        self.loaded.append(policy)
        self.out_of_service = ""
        return 0.0


class Bench:
    """The trainer's end of the streams, and engines that follow it."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._server = redis.Redis.from_url(settings.url)
        self.trainer = StreamClient(settings, "r", 60.0)
        self.trainer.publish(FIRST)

    def connect(self, run: str = "r") -> StreamClient:
        return StreamClient(self._settings, run, 60.0)

    def lose_volume(self) -> None:
        self._server.flushall()

    @asynccontextmanager
    async def following(self, engine: Engine) -> AsyncIterator[None]:
        task = asyncio.create_task(Follower(self.connect(), engine, "replica").follow())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    def read_word(self, name: str = "replica") -> Replica:
        return self.trainer.read_replicas().get(name, Replica())

    async def until_acknowledged(self, policy: Policy) -> None:
        await until(lambda: self.read_word().serving == policy)


@pytest.fixture
def bench(redis_server: RedisSettings, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(follower, "RETRY_INTERVAL_S", 0.05)
    monkeypatch.setattr(follower, "POLL_INTERVAL_S", 0.02)
    monkeypatch.setattr(follower, "GIVE_WAY_INTERVAL_S", 0.05)
    monkeypatch.setattr(follower, "WATCH_S", 0.3)
    monkeypatch.setattr(follower, "LIVELY_S", 3600)  # other engines give one sign of life
    return Bench(redis_server.model_copy(update={"timeout_s": 2 * NEVER_S}))


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


async def test_a_policy_gives_way_to_a_newer_one_while_it_is_loaded_and_that_one_to_none(bench: Bench) -> None:
    engine = Engine()
    async with bench.following(engine):
        await bench.until_acknowledged(FIRST)
        engine.gate.clear()
        for version in (2, 3):
            bench.trainer.publish(Policy(version=version, epoch=1))
            await until(lambda version=version: engine.loads == version)
        bench.trainer.publish(Policy(version=4, epoch=1))
        await asyncio.sleep(0.2)
        assert engine.loads == 3, "else an engine would serve nothing new where loads last longer than steps"
        assert engine.loaded == [FIRST]
        engine.gate.set()
        await bench.until_acknowledged(Policy(version=4, epoch=1))
    assert [policy.version for policy in engine.loaded] == [1, 3, 4]


async def test_what_an_engine_computes_in_is_declared_before_it_serves_and_after_a_lost_volume(bench: Bench) -> None:
    engine = Engine(FIRST)
    assert bench.trainer.read_dtype() == ""
    await Follower(bench.connect(), engine, "replica").catch_up()
    assert bench.trainer.read_dtype() == "bfloat16"
    async with bench.following(engine):
        await bench.until_acknowledged(FIRST)
        bench.lose_volume()
        assert bench.trainer.read_dtype() == ""
        bench.trainer.publish(Policy(version=2, epoch=1))
        await bench.until_acknowledged(Policy(version=2, epoch=1))
        assert bench.trainer.read_dtype() == "bfloat16"


async def test_every_load_is_recorded_with_its_result_and_what_is_served_once(bench: Bench, tmp_path: Path) -> None:
    run = RunSettings(id="r", dir=tmp_path, record_history=True)
    client, engine = bench.connect(), Engine()
    client.history = open_history(run, "engine")
    await Follower(client, engine, "replica").catch_up()
    engine.refuse = True
    bench.trainer.publish(Policy(version=2, epoch=1))
    following = Follower(client, engine, "replica")
    task = asyncio.create_task(following.follow())
    await until(lambda: engine.loads > 1)
    engine.refuse = False
    await until(lambda: following._last_status == Replica(serving=Policy(version=2, epoch=1)))
    task.cancel()
    await asyncio.wait([task])
    history = read_history(run.folder)
    loads = [(load["version"], load["epoch"], load.result) for load in history.select("load")]
    assert (loads[0], loads[1], loads[-1]) == ((1, 1, "ok"), (2, 1, "error"), (2, 1, "ok"))
    serves = [(serve["version"], serve.result) for serve in history.select("serve")]
    assert serves == [(1, "ok"), (1, "ok"), (2, "ok")], "once by each of the two followers, and what is new"


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
        await until(lambda: bench.read_word().reason == "altered")
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


async def test_a_refusal_is_said_with_its_reason_and_the_old_policy_served_until_a_load_succeeds(bench: Bench) -> None:
    engine, second = Engine(FIRST), Policy(version=2, epoch=1)
    engine.refuse = True
    with capture_logs() as logs:
        async with bench.following(engine):
            bench.trainer.publish(second)
            await until(lambda: bench.read_word().refused == second)
            assert bench.read_word() == Replica(serving=FIRST, refused=second, reason="altered")
            await until(lambda: engine.loads > 2)
            assert engine.out_of_service == ""
            engine.refuse = False
            await until(lambda: bench.read_word() == Replica(serving=second))
    assert [entry["event"] for entry in logs].count("policy_refused") == 1


@pytest.mark.parametrize(("retry_s", "took_s", "rest_s"), [(1.0, 0.05, 1.0), (30.0, 2.0, 30.0), (30.0, 60.0, 540.0)])
async def test_a_policy_whose_load_takes_long_is_tried_again_the_more_rarely(
    retry_s: float, took_s: float, rest_s: float
) -> None:
    assert follower.find_rest(retry_s, took_s) == rest_s


async def test_a_refusal_ends_with_a_later_policy(bench: Bench) -> None:
    engine = Engine(FIRST)
    engine.refuse = True
    async with bench.following(engine):
        bench.trainer.publish(Policy(version=2, epoch=1))
        await until(lambda: bench.read_word().HasField("refused"))
        engine.refuse = False
        bench.trainer.publish(Policy(version=3, epoch=1))
        await until(lambda: bench.read_word() == Replica(serving=Policy(version=3, epoch=1)))


async def test_an_engine_that_refuses_what_another_one_serves_is_out_of_service_for_as_long(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that ask for the announced policy wait for every engine in service."""
    monkeypatch.setattr(follower, "RETRY_INTERVAL_S", NEVER_S)  # it does not hear of the other one by trying again
    engine, second = Engine(FIRST), Policy(version=2, epoch=1)
    engine.refuse = True
    async with bench.following(engine):
        bench.trainer.acknowledge_policy("other", Replica(serving=FIRST))
        bench.trainer.publish(second)
        await until(lambda: bench.read_word().refused == second)
        assert engine.out_of_service == "", "nobody serves it"
        bench.trainer.acknowledge_policy("other", Replica(serving=second))
        await until(lambda: bench.read_word().out_of_service)
        assert engine.out_of_service == "altered"
        bench.trainer.acknowledge_policy("other", Replica(out_of_service=True))
        await until(lambda: not bench.read_word().out_of_service)
        assert (engine.serving, engine.out_of_service) == (FIRST, "")


async def test_an_engine_that_is_out_of_service_for_a_reason_of_its_own_stays_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has tried the policy again meanwhile, which is now in its memory: the canary refuses it."""
    monkeypatch.setattr(follower, "RETRY_INTERVAL_S", NEVER_S)
    read, looks = StreamClient.read_replicas, 0

    def count_and_read(client: StreamClient, silence_s: int = 1) -> dict[str, Replica]:
        nonlocal looks
        found = read(client, silence_s)
        looks += 1
        return found

    monkeypatch.setattr(StreamClient, "read_replicas", count_and_read)
    engine, second = Engine(FIRST), Policy(version=2, epoch=1)
    engine.refuse = True
    async with bench.following(engine):
        bench.trainer.acknowledge_policy("other", Replica(serving=second))
        bench.trainer.publish(second)
        await until(lambda: bench.read_word().out_of_service)
        engine.out_of_service = "it computes another policy"
        bench.trainer.acknowledge_policy("other", Replica(out_of_service=True))
        before = looks
        await until(lambda: looks > before + 2)
        assert engine.out_of_service == "it computes another policy"


async def test_an_announcement_is_noticed_at_once_also_by_a_server_that_was_restarted_or_lost_its_data(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "WATCH_S", NEVER_S)
    engine = Engine()
    async with bench.following(engine):
        await bench.until_acknowledged(FIRST)
        for version in range(2, 8):
            if version < 5:
                bench.lose_volume()
            policy = Policy(version=version, epoch=1)
            bench.trainer.publish(policy)
            await until(lambda: engine.serving == policy)  # noqa: B023 - awaited within the round
    bench.trainer.publish(FIRST)  # ends the thread that waits for a change


async def test_a_new_engine_is_ready_once_it_serves_the_announced_policy(bench: Bench) -> None:
    engine = Engine()
    await Follower(bench.connect(), engine, "replica").catch_up()
    assert engine.serving == FIRST


async def test_a_new_engine_is_ready_with_its_own_weights_when_no_policy_is_announced(bench: Bench) -> None:
    engine = Engine()
    await Follower(bench.connect("another-run"), engine, "replica").catch_up()
    assert (engine.serving, engine.out_of_service) == (None, "")


async def test_a_new_engine_that_cannot_load_the_announced_policy_starts_out_of_service(bench: Bench) -> None:
    engine = Engine()
    engine.refuse = True
    await Follower(bench.connect(), engine, "replica").catch_up(0.3)
    assert (engine.serving, engine.out_of_service) == (None, "altered")


async def test_an_engine_that_dies_of_a_policy_is_not_followed_any_more(bench: Bench) -> None:
    """Nothing is said for it, either, although there was news to be said at the moment of its death."""

    class DyingEngine(Engine):
        async def load_policy(self, policy: Policy, allow_older: bool = False) -> float:
            if policy != FIRST:
                raise RuntimeError("died")
            return await super().load_policy(policy, allow_older)

    following = asyncio.create_task(Follower(bench.connect(), DyingEngine(), "replica").follow())
    await bench.until_acknowledged(FIRST)
    bench.trainer.publish(Policy(version=2, epoch=1))
    with pytest.raises(ExceptionGroup):
        await following


class LoadingEngine(Engine):
    """An engine that reads what it loads, as the real one does."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._cache = open_cache(settings)

    async def load_policy(self, policy: Policy, allow_older: bool = False) -> float:
        self.loads += 1
        async with hold_policy(self._cache, policy):
            self.serving = policy
        return 0.0


async def test_hostile_and_unsigned_announcements_are_refused_by_name_and_the_old_policy_is_served_on(
    bench: Bench, tmp_path: Path
) -> None:
    weights = {"weights": {"cache_dir": tmp_path / "cache"}}
    settings = Settings.model_validate({"run": {"id": "r", "dir": tmp_path / "runs"}, "rollout": weights})
    settings = settings.model_copy(update={"security": make_keys(tmp_path / "keys")})
    engine, audit = LoadingEngine(settings), tmp_path / "audit.jsonl"
    published = Publications(str(tmp_path / "runs/r/policies"), tmp_path / "scratch")
    signatures = make_signatures(tmp_path / "keys", "r")

    def publish(change: Callable[[Policy], object] = lambda policy: None, sign: bool = True) -> Policy:
        policy = published.publish(delta=False)
        change(policy)
        if sign:
            sign_announcement(policy, signatures)
        bench.trainer.publish(policy)
        return policy

    good = publish()
    (tmp_path / "secret").mkdir()
    follower = Follower(bench.connect(), engine, "replica", audit_file=audit)  # type: ignore[arg-type]
    task = asyncio.create_task(follower.follow())
    await bench.until_acknowledged(good)
    hostile: list[tuple[Callable[[Policy], object], bool, str]] = [
        (lambda policy: setattr(policy, "uri", str(tmp_path / "secret")), True, "secret' is not allowed"),
        (lambda policy: setattr(policy, "uri", "http://127.0.0.1:1/x"), True, "is not allowed"),
        (lambda policy: setattr(policy, "uri", f"simplecache::file://{policy.uri}"), True, "is not allowed"),
        (lambda policy: setattr(policy, "uri", f"{policy.uri}/../../../../secret"), True, "is no address"),
        (lambda policy: setattr(policy.files[0], "name", "../../secret/x"), True, "expected a plain name"),
        (lambda policy: None, False, "is not signed, and security.require_signed is set"),
        (lambda policy: setattr(policy, "signature", good.signature), False, "is not what the key"),
    ]
    for change, sign, reason in hostile:
        policy = publish(change, sign)
        await until(lambda policy=policy: bench.read_word().refused == policy)
        assert reason in bench.read_word().reason
        assert (bench.read_word().serving, engine.serving) == (good, good)
    last = publish()
    await bench.until_acknowledged(last)
    bench.trainer.publish(good)  # signed, and of before
    await until(lambda: bench.read_word().refused == good)
    assert "which was announced before" in bench.read_word().reason
    assert bench.read_word().serving == last
    task.cancel()
    await asyncio.wait([task])
    acts = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(act["act"], act["actor"]) for act in acts] == [("refuse_policy", "replica")] * (len(hostile) + 1)
    assert all(reason in act["reason"] for (_, _, reason), act in zip(hostile, acts, strict=False))
