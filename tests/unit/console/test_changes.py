"""Streams of what changes in runs."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from limits import WAIT_S
from run_folders import write_lines, write_run
from upath import UPath

from forage_console.context import Console
from forage_console.models.runs import RunChange, RunState
from forage_console.reading import changes
from forage_console.reading.changes import Watches
from forage_console.reading.reader import Readers
from forage_runtime.settings import Settings

Stream = AsyncGenerator[RunChange, None]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, {}, [{"step": 1}])
    return tmp_path


@pytest.fixture
def watches(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Watches:
    monkeypatch.setattr(changes, "INTERVAL_S", 0.0)
    return Watches(Readers(Console(UPath(runs), Settings())), UPath(runs))


async def next_of(stream: Stream) -> RunChange:
    return await asyncio.wait_for(anext(stream), WAIT_S)


def replace(file: Path, text: str) -> None:
    """Write a file at once: no look sees the half of it."""
    hidden = file.with_name(f".{file.name}")
    hidden.write_text(text)
    hidden.rename(file)


def remove(folder: Path) -> None:
    """Delete a folder at once."""
    shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}")))


def add_step(runs: Path, name: str, step: int) -> None:
    with (runs / name / "metrics.jsonl").open("a") as file:
        file.write(write_lines([{"step": step}]))


async def test_the_state_comes_first_and_then_what_changes(runs: Path, watches: Watches) -> None:
    async with aclosing(watches.watch_run("one")) as stream:
        first = await next_of(stream)
        assert (first.run, first.step, first.saved_steps, first.validations, first.marks) == ("one", 1, 0, 0, 0)
        add_step(runs, "two", 9)
        add_step(runs, "one", 2)
        assert (await next_of(stream)).step == 2
        (runs / "one/trajectories").mkdir()
        (runs / "one/trajectories/step-000002.parquet").write_bytes(b"")
        assert (await next_of(stream)).saved_steps == 1
        (runs / "one/validation/before.json").write_text("{}")
        assert (await next_of(stream)).validations == 1
        replace(runs / "one/events.jsonl", '{"time": 5, "kind": "start", "text": "x", "step": 0}\n')
        assert (await next_of(stream)).marks == 1
        replace(runs / "one/state.json", '{"phase": "done"}')
        assert (await next_of(stream)).state is RunState.DONE


async def test_all_runs_are_watched_together(runs: Path, watches: Watches) -> None:
    async with aclosing(watches.watch_all()) as stream:
        assert {(await next_of(stream)).run for _ in range(2)} == {"one", "two"}
        add_step(runs, "two", 2)
        change = await next_of(stream)
        assert (change.run, change.step) == ("two", 2)
        shutil.copytree(runs / "one", runs / ".three").rename(runs / "three")
        assert (await next_of(stream)).run == "three"
        remove(runs / "two")
        while (change := await next_of(stream)).progress.phase != "gone":
            pass  # a look at the very instant may still find a part of the files
        assert change.run == "two"


async def test_the_stream_of_a_deleted_run_ends(runs: Path, watches: Watches) -> None:
    async with aclosing(watches.watch_run("one")) as stream:
        await next_of(stream)
        remove(runs / "one")
        states = [change.state async for change in stream]
    assert states[-1] is RunState.BROKEN, "a look at the very instant may still find a part of the files"


async def test_listeners_share_one_task_that_ends_with_the_last(runs: Path, watches: Watches) -> None:
    def list_tasks() -> list[str]:
        return [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "watch runs"]

    streams = [watches.watch_run("one") for _ in range(5)]
    assert {(await next_of(stream)).step for stream in streams} == {1}
    assert len(list_tasks()) == 1
    add_step(runs, "one", 2)
    assert {(await next_of(stream)).step for stream in streams} == {2}
    for stream in streams[:4]:
        await stream.aclose()
    assert len(list_tasks()) == 1
    await streams[4].aclose()
    await asyncio.sleep(0)
    assert list_tasks() == []
    add_step(runs, "one", 3)
    async with aclosing(watches.watch_run("one")) as stream:
        assert (await next_of(stream)).step == 3, "one that listens later begins with the state of then"


async def test_a_folder_that_is_out_of_reach_for_a_moment_ends_no_stream(
    runs: Path, watches: Watches, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aclosing(watches.watch_all()) as stream:
        for _ in range(2):
            await next_of(stream)
        broken = asyncio.Event()
        loop = asyncio.get_running_loop()

        def fail(*_: object) -> list[str]:
            loop.call_soon_threadsafe(broken.set)
            raise OSError("no route to host")

        with monkeypatch.context() as patch:
            patch.setattr("forage_console.reading.summaries.Summaries.list_runs", fail)
            await asyncio.wait_for(broken.wait(), WAIT_S)
        add_step(runs, "one", 2)
        change = await next_of(stream)
        assert (change.run, change.step) == ("one", 2)


async def test_a_look_that_fails_is_not_the_last(runs: Path, watches: Watches, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, loop = asyncio.Event(), asyncio.get_running_loop()

    def fail(folder: UPath) -> list[Any]:
        loop.call_soon_threadsafe(failed.set)
        raise KeyError("damaged")

    async with aclosing(watches.watch_run("one")) as stream:
        await next_of(stream)
        with monkeypatch.context() as damage:
            damage.setattr(changes, "read_events", fail)
            add_step(runs, "one", 2)
            (runs / "one/events.jsonl").touch()
            await asyncio.wait_for(failed.wait(), WAIT_S)
        add_step(runs, "one", 3)
        assert (await next_of(stream)).step in (2, 3)
