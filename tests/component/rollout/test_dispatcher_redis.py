"""A dispatcher stops at full streams, and outlives a Redis server that refuses or hangs."""

from __future__ import annotations

import asyncio
import random
import signal

import psutil
import redis
from dispatcher_bench import Bench, answer, build_prompt

from forage_queue.rollout.backpressure import Backpressure
from forage_runtime.settings import RedisSettings
from forage_trajectory.codec import pack_group


async def test_a_full_stream_of_trajectories_stops_claiming(bench: Bench) -> None:
    most = 2 * 2 * (bench.settings.trainer.save_freq + bench.settings.trainer.max_staleness + 1)
    for position in range(most + 6):
        bench.trainer.issue(build_prompt(position))
    async with bench.run() as dispatcher:
        await bench.wait_until(lambda: dispatcher.counts.backpressure_seconds > 0)
        await bench.wait_until(lambda: dispatcher.counts.groups_in_flight == 0)
        done = len(bench.runs)
        assert most <= done <= most + 4
        await asyncio.sleep(0.3)
        assert len(bench.runs) == done
        assert len(await bench.take_groups(most + 6)) == most + 6


async def test_too_many_bytes_on_the_stream_stop_claiming_but_never_below_what_the_trainer_needs(bench: Bench) -> None:
    redis_ = bench.settings.redis.model_copy(update={"max_stream_bytes": 1})
    bench.settings = bench.settings.model_copy(update={"redis": redis_})
    needed = 2 * (bench.settings.trainer.max_staleness + 1)
    async with bench.run() as dispatcher:
        for position in range(needed):  # one by one: below the limit each is claimed, however many bytes there are
            bench.trainer.issue(build_prompt(position))
            await bench.wait_until(lambda done=position + 1: dispatcher.counts.groups_done == done)
        for position in range(needed, needed + 6):
            bench.trainer.issue(build_prompt(position))
        await bench.wait_until(lambda: dispatcher.hold is not None)
        assert dispatcher.hold is not None
        assert dispatcher.hold.reason == "bytes"
        assert "take " in dispatcher.notes["backpressure"]
        await bench.wait_until(lambda: dispatcher.counts.groups_in_flight == 0)
        done = dispatcher.counts.groups_done
        assert needed <= done <= needed + 4, "the claim that was already waiting may bring in a few"
        await asyncio.sleep(0.3)
        assert dispatcher.counts.groups_done == done
        assert len(await bench.take_groups(needed + 6)) == needed + 6
        await bench.wait_until(lambda: dispatcher.hold is None)
        assert dispatcher.notes == {}


async def test_half_of_the_servers_memory_is_the_default_limit_in_bytes(bench: Bench, server: redis.Redis) -> None:
    bench.trainer.issue(build_prompt(0))
    server.config_set("maxmemory", "100mb")
    backpressure = Backpressure(bench.settings, bench.trainer)
    (entry, *_) = bench.trainer.claim_prompts("one", 1, 0.1)
    group = await answer(entry.message)
    group.trajectories[0].status_detail = random.Random(0).randbytes(2**20).hex()  # coded, half of it
    for position in range(1, 5):
        assert backpressure.find_hold() is None
        assert bench.trainer.finish(entry, pack_group(group))
        bench.trainer.issue(build_prompt(position))
        (entry,) = bench.trainer.claim_prompts("one", 1, 0.1)
    assert backpressure.find_hold() is None
    server.config_set("maxmemory", "8mb")
    hold = backpressure.find_hold()
    assert hold is not None
    assert (hold.reason, hold.detail.split(" ")[0]) == ("bytes", "4")
    assert f"the limit is {4 * 2**20}" in hold.detail


async def test_a_finished_group_outlives_a_server_that_refuses_for_now(bench: Bench, server: redis.Redis) -> None:
    async with bench.run_one() as (dispatcher, release):
        server.config_set("min-replicas-to-write", "1")
        release.set()
        await bench.wait_until(lambda: "fewer replicas" in dispatcher.notes.get("writes", ""))
        await bench.wait_until(lambda: dispatcher.counts.redis_waits > 3)
        assert (dispatcher.counts.groups_in_flight, dispatcher.counts.groups_done) == (1, 0)
        server.config_set("min-replicas-to-write", "0")
        assert [group.position for group in await bench.take_groups(1)] == [0]
        assert await bench.take_groups(1, 0.3) == []
        assert bench.runs == ["g/0"]
        await bench.wait_until(lambda: dispatcher.notes == {})


async def test_a_finished_group_outlives_an_error_that_nobody_thought_of(bench: Bench, server: redis.Redis) -> None:
    async with bench.run_one() as (dispatcher, release):
        server.execute_command("ACL", "SETUSER", "default", "-fcall")
        release.set()
        await bench.wait_until(lambda: dispatcher.counts.writes_repeated > 0)
        assert "group g/0 cannot be written" in dispatcher.notes["writes"]
        await bench.wait_until(lambda: dispatcher.counts.writes_repeated > 1)
        assert dispatcher.counts.groups_in_flight == 1
        server.execute_command("ACL", "SETUSER", "default", "+fcall")
        assert [group.position for group in await bench.take_groups(1)] == [0]
        assert bench.runs == ["g/0"]
        assert dispatcher.counts.restarts == 0


async def test_groups_outlive_a_redis_that_hangs(bench: Bench, redis_server: RedisSettings) -> None:
    port = int(redis_server.url.rpartition(":")[2].partition("/")[0])
    (server,) = {c.pid for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == "LISTEN"}
    process = psutil.Process(server)
    bench.give_up_soon()
    async with bench.run_one() as (dispatcher, release):
        process.send_signal(signal.SIGSTOP)
        try:
            release.set()
            await bench.wait_until(lambda: dispatcher.counts.redis_waits > 0)
        finally:
            process.send_signal(signal.SIGCONT)
        assert [group.position for group in await bench.take_groups(1)] == [0]
        assert bench.runs == ["g/0"]


async def test_prompts_that_nobody_can_work_on_are_rejected(bench: Bench, server: redis.Redis) -> None:
    trainer = bench.trainer
    for fields in (
        {"samples": 2**31 - 1},
        {"samples": -1},
        {"reply_stream": trainer.key("policy")},
        {"reply_stream": "forage:{other}:trajectories"},
    ):
        server.xadd(trainer.prompts, {"m": build_prompt(0, **fields).SerializeToString()})
    server.xadd(trainer.prompts, {"m": b"\xff\xff"})
    trainer.issue(build_prompt(1))
    async with bench.run() as dispatcher:
        assert [group.position for group in await bench.take_groups(1)] == [1]
        await bench.wait_until(lambda: trainer.count_backlog(trainer.prompts) == 0)
        await bench.wait_until(lambda: dispatcher.counts.groups_done + dispatcher.counts.groups_failed > 0)
        assert (dispatcher.counts.groups_done, dispatcher.counts.groups_failed) == (1, 0)
    assert bench.runs == ["g/1"]
    assert server.xlen(trainer.key("rejected")) == 5
    assert not server.exists("forage:{other}:trajectories")
