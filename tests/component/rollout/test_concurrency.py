"""How many groups a dispatcher has in flight, with a real Redis server and engines that say what they have to do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from dispatcher_bench import Bench, answer, build_prompt

from forage_proto.v1.trajectory_pb2 import Prompt, TrajectoryGroup
from forage_queue.rollout import concurrency as module
from forage_rollout.metrics import Counts


async def test_a_dispatcher_claims_more_at_once_when_the_limit_rises(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.05)
    bench.reclaim_soon()  # looks for lost prompts find, too, that the limit holds
    release = asyncio.Event()
    counts: dict[str, Counts] = {"engine": {("requests_waiting",): 1000}}

    async def wait(asked: Prompt) -> TrajectoryGroup:
        await release.wait()
        return await answer(asked)

    async def ask() -> Mapping[str, Counts]:
        return counts

    engine = bench.settings.rollout.engine.model_copy(update={"max_num_seqs": 2})
    rollout = bench.settings.rollout.model_copy(update={"engine": engine, "max_trajectories_in_flight": 100})
    bench.settings = bench.settings.model_copy(update={"rollout": rollout})
    for position in range(6):
        bench.trainer.issue(build_prompt(position))
    async with bench.run(wait, ask_counts=ask) as dispatcher:
        await bench.wait_until(lambda: dispatcher.limit.reason == "queue" and len(bench.runs) > 0)
        assert (len(bench.runs), dispatcher.limit.groups) == (1, 1)
        counts["engine"] = {}
        await bench.wait_until(lambda: len(bench.runs) == 4)  # the ceiling, while none has ended
        counts["engine"] = {("evictions",): 5}
        await bench.wait_until(lambda: dispatcher.limit.lowered == 1)
        release.set()
        assert len(await bench.take_groups(6)) == 6, "a batch has all of its groups, whatever the limit"


async def test_engines_that_do_not_answer_end_no_dispatcher(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.05)

    async def ask() -> Mapping[str, Counts]:
        raise RuntimeError("no replica is running")

    async def answer_late(asked: Prompt) -> TrajectoryGroup:
        await bench.wait_until(lambda: dispatcher.limit.reason == "engines")
        return await answer(asked)

    bench.trainer.issue(build_prompt(0))
    async with bench.run(answer_late, ask_counts=ask) as dispatcher:
        assert len(await bench.take_groups(1)) == 1
        assert dispatcher.counts.restarts == 0
