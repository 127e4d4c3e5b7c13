"""Prompts are claimed, run and finished exactly once, with a real Redis server."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from itertools import pairwise

import pytest
import redis
from dispatcher_bench import Bench, answer, build_prompt
from loop_clock import LoopClock
from otlp_receiver import Receiver
from waiting import WAIT_S, wait_until

from forage_proto.v1.trajectory_pb2 import Policy, Prompt, Status, TrajectoryGroup
from forage_queue.rollout import dispatcher as module
from forage_queue.streams.client import GROUP, Entry, StreamClient
from forage_runtime.settings import EnvironmentRoute
from forage_runtime.telemetry import tracing


async def test_every_prompt_is_answered_once(bench: Bench) -> None:
    for position in range(10):
        bench.trainer.issue(build_prompt(position))
    async with bench.run() as dispatcher:
        groups = await bench.take_groups(10)
        assert await bench.take_groups(1, 0.2) == []
        await bench.wait_until(lambda: dispatcher.counts.groups_done == 10)
    assert sorted(group.position for group in groups) == list(range(10))
    assert sorted(bench.runs) == sorted({f"g/{i}" for i in range(10)})
    assert bench.trainer.count_backlog(bench.trainer.prompts) == 0


async def test_the_environments_are_declared_before_anything_is_claimed(bench: Bench) -> None:
    declared = []

    async def look(asked: Prompt) -> TrajectoryGroup:
        declared.append(bench.trainer.read_environments())
        return await answer(asked)

    route = EnvironmentRoute(name="/here/own.py:Own")
    rollout = bench.settings.rollout.model_copy(update={"environments": {"kg": route}})
    bench.settings = bench.settings.model_copy(update={"rollout": rollout})
    bench.trainer.issue(build_prompt(0))
    async with bench.run(look):
        await bench.take_groups(1)
    assert declared == [{"kg": "own.py:Own"}]


async def test_no_more_groups_are_in_flight_than_allowed(bench: Bench) -> None:
    release = asyncio.Event()

    async def wait(asked: Prompt) -> TrajectoryGroup:
        await release.wait()
        return await answer(asked)

    for position in range(6):
        bench.trainer.issue(build_prompt(position))
    async with bench.run(wait) as dispatcher:
        await bench.wait_until(lambda: len(bench.runs) == 4)
        await asyncio.sleep(0.2)
        assert dispatcher.counts.groups_in_flight == len(bench.runs) == 4
        release.set()
        assert len(await bench.take_groups(6)) == 6


async def test_no_more_trajectories_are_in_flight_than_allowed(bench: Bench) -> None:
    release = asyncio.Event()

    async def wait(asked: Prompt) -> TrajectoryGroup:
        await release.wait()
        return await answer(asked)

    bench.limit(5)
    for position in range(6):
        bench.trainer.issue(build_prompt(position))
    async with bench.run(wait) as dispatcher:
        await bench.wait_until(lambda: len(bench.runs) == 2)
        await asyncio.sleep(0.2)
        assert dispatcher.counts.groups_in_flight == len(bench.runs) == 2, "2 groups of 2; a third would make it 6"
        release.set()
        assert len(await bench.take_groups(6)) == 6


async def test_a_group_larger_than_the_limit_runs_alone(bench: Bench) -> None:
    bench.limit(1)
    for position in range(2):
        bench.trainer.issue(build_prompt(position))
    async with bench.run():
        assert len(await bench.take_groups(2)) == 2


async def test_draining_lets_running_groups_end_and_leaves_the_others_to_the_next(
    bench: Bench, loop_clock: LoopClock
) -> None:
    release = asyncio.Event()

    async def wait(asked: Prompt) -> TrajectoryGroup:
        if asked.position == 0:
            await release.wait()
        elif asked.position == 1:
            await asyncio.Event().wait()
        return await answer(asked)

    for position in range(2):
        bench.trainer.issue(build_prompt(position))
    async with bench.run(wait) as dispatcher:
        await bench.wait_until(lambda: len(bench.runs) == 2)
        draining = asyncio.create_task(dispatcher.drain(3600.0))
        await asyncio.sleep(0)  # it drains
        bench.trainer.issue(build_prompt(2))
        release.set()
        assert [group.position for group in await bench.take_groups(1)] == [0]
        assert not draining.done()
        await bench.wait_until(lambda: dispatcher.counts.groups_in_flight == 1)
        loop_clock.skip(3600.0)
        assert await draining == 1
        assert await bench.take_groups(1, 0.3) == [], "nothing is taken any more"
    assert sorted(bench.runs) == ["g/0", "g/1"]
    bench.reclaim_soon()
    async with bench.run():
        assert sorted(group.position for group in await bench.take_groups(2)) == [1, 2]


async def test_prompts_of_a_dead_worker_are_reclaimed(bench: Bench) -> None:
    bench.reclaim_soon()
    bench.trainer.issue(build_prompt(0))
    assert bench.trainer.claim_prompts("dead", 1, 0.1)
    async with bench.run() as dispatcher:
        assert [group.position for group in await bench.take_groups(1)] == [0]
        assert dispatcher.counts.groups_reclaimed == 1


async def test_prompts_of_an_earlier_process_of_the_worker_are_taken_over_at_once(bench: Bench) -> None:
    for position in range(4):
        bench.trainer.issue(build_prompt(position))
    assert len(bench.trainer.claim_prompts("one", 3, 0.1)) == 3
    assert len(bench.trainer.claim_prompts("other", 1, 0.1)) == 1
    async with bench.run(consumer="one") as dispatcher:
        assert sorted(group.position for group in await bench.take_groups(3)) == [0, 1, 2]
        assert await bench.take_groups(1, 0.2) == [], "that of another worker"
        assert dispatcher.counts.groups_reclaimed == 3


async def test_what_ends_while_prompts_are_taken_over_is_not_run_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed trajectory a dispatcher takes over again, and reads the prompts that it works on itself, too."""
    release, loop, real = asyncio.Event(), asyncio.get_running_loop(), StreamClient.take_over_prompts

    def take_over_late(self: StreamClient, consumer: str, count: int) -> list[Entry[Prompt]]:
        found = real(self, consumer, count)
        if found:
            loop.call_soon_threadsafe(release.set)
            wait_until(lambda: not dispatcher.counts.groups_in_flight)
        return found

    async def answer_or_fail(asked: Prompt) -> TrajectoryGroup:
        group = await answer(asked)
        if asked.position == 0:
            await release.wait()
        else:
            group.trajectories.add(status=Status.STATUS_TIMEOUT)
        return group

    monkeypatch.setattr(StreamClient, "take_over_prompts", take_over_late)
    async with bench.run(answer_or_fail) as dispatcher:
        for position in range(2):
            bench.trainer.issue(build_prompt(position))
        assert len(await bench.take_groups(2)) == 2
        bench.trainer.issue(build_prompt(2))
        assert len(await bench.take_groups(1)) == 1
        assert dispatcher.counts.restarts == 0
    assert sorted(bench.runs) == ["g/0", "g/1", "g/2"]


async def test_a_long_run_is_kept_alive_again_and_again(
    bench: Bench, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.1)
    idle_ms: list[int] = []

    def is_reset(times: int) -> bool:
        """Whether Redis has begun anew so often to count how long the worker was silent."""
        (pending,) = server.xpending_range(bench.trainer.prompts, GROUP, "-", "+", 1)
        idle_ms.append(pending["time_since_delivered"])
        return sum(later < sooner for sooner, later in pairwise(idle_ms)) >= times

    async with bench.run_one() as (_, release):
        await bench.wait_until(lambda: is_reset(3))
        release.set()
        assert len(await bench.take_groups(1)) == 1
    assert bench.runs == ["g/0"]


async def test_a_group_is_run_again_when_an_engine_fails(bench: Bench) -> None:
    async def answer_second_time(asked: Prompt) -> TrajectoryGroup:
        if len(bench.runs) == 1:
            raise RuntimeError("the engine died")
        return await answer(asked)

    bench.trainer.issue(build_prompt(0))
    async with bench.run(answer_second_time) as dispatcher:
        assert len((await bench.take_groups(1))[0].trajectories) == 2
        assert dispatcher.counts.runs_repeated == 1


async def test_a_group_that_never_runs_is_written_with_a_failed_status(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never_answer(asked: Prompt) -> TrajectoryGroup:
        raise RuntimeError("no engine")

    monkeypatch.setattr(module, "MAX_RUNS", 2)
    bench.trainer.issue(build_prompt(0))
    async with bench.run(never_answer):
        (group,) = await bench.take_groups(1)
    assert [t.status for t in group.trajectories] == [Status.STATUS_INTERNAL] * 2
    assert "no engine" in group.trajectories[0].status_detail


async def test_a_prompt_waits_for_the_policy_it_asks_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLICY_TIMEOUT_S", 0.3)
    bench.reclaim_soon()
    bench.trainer.issue(build_prompt(0, min_policy_version=2))
    bench.trainer.issue(build_prompt(1, min_policy_version=1))
    async with bench.run() as dispatcher:
        assert [group.position for group in await bench.take_groups(1)] == [1]
        await bench.wait_until(lambda: dispatcher.counts.groups_released > 0)
        assert bench.runs == ["g/1"]
        bench.engine.serve(Policy(version=2, epoch=1))
        assert [group.position for group in await bench.take_groups(1)] == [0]


async def test_with_an_endpoint_no_prompt_waits_for_a_policy_version(bench: Bench) -> None:
    engine = bench.settings.rollout.engine.model_copy(update={"endpoint": "http://127.0.0.1:9/v1"})
    rollout = bench.settings.rollout.model_copy(update={"engine": engine})
    bench.settings = bench.settings.model_copy(update={"rollout": rollout})
    bench.trainer.issue(build_prompt(0, min_policy_version=2))
    async with bench.run():
        assert len(await bench.take_groups(1)) == 1


async def test_a_prompt_waits_for_the_epoch_that_was_published_last(bench: Bench) -> None:
    bench.engine.serve(Policy(version=9, epoch=1))
    bench.trainer.publish(Policy(version=1, epoch=2))
    bench.trainer.issue(build_prompt(0, min_policy_version=1))
    async with bench.run():
        await asyncio.sleep(0.2)
        assert bench.runs == []
        bench.engine.serve(Policy(version=1, epoch=2))
        assert len(await bench.take_groups(1)) == 1


async def test_a_prompt_waits_for_a_lower_epoch_that_was_announced_after_a_higher_one(
    bench: Bench, server: redis.Redis
) -> None:
    bench.trainer.publish(Policy(version=20, epoch=3))
    bench.engine.serve(Policy(version=20, epoch=3))
    bench.trainer.issue(build_prompt(0, min_policy_version=18))
    async with bench.run():
        assert len(await bench.take_groups(1)) == 1
        server.flushall()  # it lost its volume, and epochs begin again
        bench.trainer.publish(Policy(version=18, epoch=1))
        bench.trainer.issue(build_prompt(1, min_policy_version=18))
        await asyncio.sleep(0.2)
        assert bench.runs == ["g/0"], "version 20 of another epoch is not version 18 of this one"
        bench.engine.serve(Policy(version=18, epoch=1))
        assert len(await bench.take_groups(1)) == 1


async def test_no_prompt_is_claimed_before_retriever_and_reward_are_ready(bench: Bench) -> None:
    bench.services.clear()
    bench.trainer.issue(build_prompt(0))
    async with bench.run():
        await asyncio.sleep(0.2)
        assert bench.runs == []
        bench.services.set()
        assert len(await bench.take_groups(1)) == 1


async def test_after_a_failed_trajectory_services_are_probed_before_more_is_claimed(bench: Bench) -> None:
    async def fail(asked: Prompt) -> TrajectoryGroup:
        bench.services.clear()
        group = await answer(asked)
        group.trajectories.add(status=Status.STATUS_TIMEOUT)
        return group

    bench.trainer.issue(build_prompt(0))
    async with bench.run(fail):
        assert len(await bench.take_groups(1)) == 1
        # The take that was already waiting for prompts may bring in more groups; the next waits.
        await bench.wait_until(lambda: bench.is_waiting_for_services)
        seen = len(bench.runs)
        bench.trainer.issue(build_prompt(1))
        await asyncio.sleep(0.3)
        assert len(bench.runs) == seen, "nothing is taken while the services are in doubt"
        bench.services.set()
        await bench.wait_until(lambda: len(bench.runs) > seen)


async def test_runs_that_an_engine_cut_short_are_events_of_the_groups_span(bench: Bench, receiver: Receiver) -> None:
    async def die_once(asked: Prompt) -> TrajectoryGroup:
        if len(bench.runs) == 1:
            raise RuntimeError("the engine is gone")
        return await answer(asked)

    bench.trainer.issue(build_prompt(0))
    async with bench.run(die_once) as dispatcher:
        (group,) = await bench.take_groups(1)
        await bench.wait_until(lambda: dispatcher.counts.groups_done == 1)
    tracing.stop()
    (work,) = receiver.named("rollout.group")
    assert (work.events, work.failed) == (("run_failed",), False)
    (written,) = receiver.named("rollout.write")
    assert written.parent_id == work.span_id
    assert group.traceparent[3:52] == f"{written.trace_id}-{written.span_id}"


async def test_groups_whose_files_are_slow_hold_up_no_sign_of_life(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.02)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))  # as on a machine without CPUs to spare
    written, writing, signs = threading.Event(), [], []
    finish, keep_alive = StreamClient.finish, StreamClient.keep_alive

    def finish_slowly(self: StreamClient, entry: Entry[Prompt], group: TrajectoryGroup) -> bool:
        writing.append(entry.id)
        assert written.wait(WAIT_S)
        return finish(self, entry, group)

    def count_sign(self: StreamClient, consumer: str, ids: list[bytes]) -> None:
        keep_alive(self, consumer, ids)
        signs.append(len(writing))

    monkeypatch.setattr(StreamClient, "finish", wraps(finish)(finish_slowly))
    monkeypatch.setattr(StreamClient, "keep_alive", wraps(keep_alive)(count_sign))
    for position in range(4):
        bench.trainer.issue(build_prompt(position))
    async with bench.run() as dispatcher:
        try:
            await bench.wait_until(lambda: signs.count(4) >= 3)
            assert dispatcher.counts.groups_done == 0
        finally:
            written.set()
        assert len(await bench.take_groups(4)) == 4
