"""Several dispatchers: their names, how many there are, and what they share out."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dispatcher_bench import Bench, answer, build_prompt

from forage_common.settings import RolloutSettings, Settings
from forage_common.v1.trajectory_pb2 import Prompt, TrajectoryGroup
from forage_rollout.deployments.autoscaling import ONGOING, count_wanted
from forage_rollout.deployments.cluster import limit_to_machine
from forage_rollout.worker_names import WorkerName

HOLD = (
    "import sys; from forage_common.settings import Settings; from forage_rollout.worker_names import WorkerName;"
    "name = WorkerName(Settings()); print(name.text, flush=True); sys.stdin.read()"
)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def hold_name() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read_name(holder: subprocess.Popen[str]) -> str:
    assert holder.stdout is not None
    return holder.stdout.readline().strip()


@pytest.mark.usefixtures("temporary")
def test_a_killed_dispatchers_name_is_its_successors() -> None:
    holders = [hold_name()]
    try:
        first = read_name(holders[0])
        holders.append(hold_name())
        second = read_name(holders[1])
        assert second == f"{first}-1"
        holders[0].kill()
        holders[0].wait()
        successor = WorkerName(Settings())
        third = WorkerName(Settings())
        assert (successor.text, third.text) == (first, f"{first}-2")
        successor.release()
        assert WorkerName(Settings()).text == first
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


@pytest.mark.usefixtures("temporary")
def test_services_of_other_addresses_have_names_of_their_own() -> None:
    one = WorkerName(Settings())
    other = WorkerName(Settings(rollout=RolloutSettings(grpc_address="127.0.0.1:9")))
    assert one.text.endswith("127.0.0.1:18630")
    assert other.text.endswith("127.0.0.1:9")


async def test_dispatchers_share_out_the_prompts_of_a_batch(bench: Bench) -> None:
    release, runs = asyncio.Event(), {"one": 0, "two": 0}

    def count_for(name: str):  # type: ignore[no-untyped-def]
        async def wait(asked: Prompt) -> TrajectoryGroup:
            runs[name] += 1
            await release.wait()
            return await answer(asked)

        return wait

    for position in range(8):
        bench.trainer.issue(build_prompt(position))
    async with bench.run(count_for("one"), consumer="one"), bench.run(count_for("two"), consumer="two"):
        await bench.wait_until(lambda: sum(runs.values()) == 8)
        assert runs == {"one": 4, "two": 4}, "each has its own limit"
        release.set()
        assert sorted(group.position for group in await bench.take_groups(8)) == list(range(8))


async def test_a_dispatcher_that_drains_leaves_new_prompts_to_the_others(bench: Bench) -> None:
    release = asyncio.Event()

    async def wait(asked: Prompt) -> TrajectoryGroup:
        await release.wait()
        return await answer(asked)

    bench.trainer.issue(build_prompt(0))
    async with bench.run(wait, consumer="one") as leaving:
        await bench.wait_until(lambda: leaving.counts.groups_in_flight == 1)
        async with bench.run(consumer="two") as staying:
            draining = asyncio.create_task(leaving.drain(10.0))
            await asyncio.sleep(0.1)
            for position in range(1, 4):
                bench.trainer.issue(build_prompt(position))
            assert sorted(group.position for group in await bench.take_groups(3)) == [1, 2, 3]
            release.set()
            assert await draining == 0, "the group in flight ends where it began"
            assert [group.position for group in await bench.take_groups(1)] == [0]
            assert (leaving.counts.groups_done, staying.counts.groups_done) == (1, 3)
    assert sorted(bench.runs) == ["g/0", "g/1", "g/2", "g/3"]


@pytest.mark.parametrize(("in_flight", "wanted"), [([], 0), ([10], 1), ([256], 1), ([300], 2), ([256, 256, 256], 3)])
def test_there_is_a_dispatcher_for_every_so_many_groups_in_flight(in_flight: list[int], wanted: int) -> None:
    context: Any = SimpleNamespace(
        aggregated_metrics={ONGOING: dict(enumerate(in_flight))} if in_flight else None,
        total_num_requests=0.0,
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 256.0),
    )
    replicas, state = count_wanted(context)
    assert (math.ceil(replicas), state) == (wanted, {}), "Serve keeps to the least and the most"


def test_a_machine_has_no_more_agents_and_dispatchers_than_cpus() -> None:
    settings = Settings()
    small = limit_to_machine(settings, 2).rollout
    assert (small.agent_replicas.max, small.dispatcher_replicas.max) == (2, 2)
    large = limit_to_machine(settings, 64).rollout
    assert (large.agent_replicas.max, large.dispatcher_replicas.max) == (8, 4)
    asked = RolloutSettings.model_validate({"agent_replicas": {"min": 3, "max": 5}})
    assert limit_to_machine(Settings(rollout=asked), 1).rollout.agent_replicas.max == 3, "what is asked for stays"
