"""Several dispatchers: the names of processes, and what they share out."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from dispatcher_bench import Bench, answer, build_prompt

from forage_proto.v1.trajectory_pb2 import Prompt, TrajectoryGroup
from forage_rollout.worker_names import WorkerName
from forage_runtime.settings import Settings

HOLD = (
    "import sys; from forage_runtime.settings import Settings; from forage_rollout.worker_names import WorkerName;"
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


def is_claiming() -> bool:
    return any(getattr(task.get_coro(), "__name__", "") == "_claim" for task in asyncio.all_tasks())


async def test_a_dispatcher_that_drains_leaves_new_prompts_to_the_others(bench: Bench) -> None:
    release = asyncio.Event()

    async def wait(asked: Prompt) -> TrajectoryGroup:
        await release.wait()
        return await answer(asked)

    bench.trainer.issue(build_prompt(0))
    async with bench.run(wait, consumer="one") as leaving:
        await bench.wait_until(lambda: leaving.counts.groups_in_flight == 1)
        assert is_claiming()
        draining = asyncio.create_task(leaving.drain(3600.0))
        await bench.wait_until(lambda: not is_claiming())
        async with bench.run(consumer="two") as staying:
            for position in range(1, 4):
                bench.trainer.issue(build_prompt(position))
            assert sorted(group.position for group in await bench.take_groups(3)) == [1, 2, 3]
            release.set()
            assert await draining == 0, "the group in flight ends where it began"
            assert [group.position for group in await bench.take_groups(1)] == [0]
            await bench.wait_until(lambda: (leaving.counts.groups_done, staying.counts.groups_done) == (1, 3))
    assert sorted(bench.runs) == ["g/0", "g/1", "g/2", "g/3"]
