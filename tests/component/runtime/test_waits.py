"""Waits are listed while they last, from threads and tasks, with whom they wait for and when they give up."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from waiting import WAIT_S, wait_until

from forage_runtime.telemetry.health import Health, serve_health
from forage_runtime.telemetry.stacks import FOLDER_VARIABLE, SIGNAL, find_stack_file
from forage_runtime.telemetry.waits import idling, list_waits, waiting

STUCK = (
    "import ctypes, sys\nfrom forage_runtime.telemetry.stacks import write_stacks_on_signal\n"
    "write_stacks_on_signal()\nprint(1, flush=True)\n"
    "def hang_in_c():\n    while True:\n        ctypes.PyDLL(None).sleep(60)\nhang_in_c()"
)


def test_a_wait_is_listed_while_it_lasts_and_never_after(free_address: Callable[[], str]) -> None:
    address = free_address()
    server = serve_health(address, Health())
    try:
        with idling("prompts", on="trainer"), waiting("gold", on="mine", limit_s=600) as wait:
            wait.detail = "nugget 7"
            idle, gold = httpx.get(f"http://{address}/waitz", timeout=WAIT_S).json()["waits"]
            assert (idle["what"], idle["idle"], idle["gives_up_in_s"]) == ("prompts", True, None)
            assert (gold["on"], gold["detail"], gold["count"]) == ("mine", "nugget 7", 1)
            assert 0 < gold["gives_up_in_s"] <= 600
            assert str(os.getpid()) in gold["process"]
        with pytest.raises(RuntimeError, match="collapsed"), waiting("gold", on="mine", limit_s=60):
            raise RuntimeError("collapsed")
        assert httpx.get(f"http://{address}/waitz", timeout=WAIT_S).json() == {"waits": []}
    finally:
        server.shutdown()


def test_progress_moves_the_end_and_not_the_beginning() -> None:
    with waiting("gold", on="mine", limit_s=60) as wait:
        wait.began -= 100
        wait.renewed -= 100
        (overdue,) = list_waits()
        assert overdue["gives_up_in_s"] <= -40
        wait.renew(ago_s=10)
        (renewed,) = list_waits()
        assert renewed["waited_s"] >= 100
        assert overdue["gives_up_in_s"] < renewed["gives_up_in_s"] <= 50


def test_a_wait_has_a_limit_or_a_reason() -> None:
    with pytest.raises(ValueError, match="gold needs either"), waiting("gold", on="mine", limit_s=None):
        pass
    with pytest.raises(ValueError, match="gold needs either"), waiting("gold", on="mine", limit_s=1, why_unlimited="x"):
        pass


async def test_waits_of_tasks_and_threads_of_a_kind_are_counted() -> None:
    release, release_thread = asyncio.Event(), threading.Event()

    async def wait_in_task(number: int) -> None:
        with waiting("gold", on="mine", limit_s=60, detail=str(number)):
            await release.wait()

    def wait_in_thread() -> None:
        with waiting("gold", on="mine", limit_s=60):
            release_thread.wait()

    async with asyncio.TaskGroup() as tasks:
        for number in range(3):
            tasks.create_task(wait_in_task(number))
        tasks.create_task(asyncio.to_thread(wait_in_thread))
        while not list_waits() or list_waits()[0]["count"] < 4:
            await asyncio.sleep(0)
        (wait,) = list_waits()
        assert wait["detail"] == "0", "the oldest is shown"
        release.set()
        release_thread.set()
    assert list_waits() == []


@pytest.mark.parametrize("to_file", [True, False])
def test_a_process_that_hangs_in_c_code_writes_its_stacks(tmp_path: Path, to_file: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != FOLDER_VARIABLE}
    if to_file:
        environment[FOLDER_VARIABLE] = str(tmp_path / "stacks")
    command = [sys.executable, "-c", STUCK]
    errors = tmp_path / "stderr"
    with errors.open("wb") as stderr, subprocess.Popen(command, env=environment, stdout=-1, stderr=stderr) as process:
        assert process.stdout is not None
        process.stdout.readline()
        file = find_stack_file(tmp_path / "stacks", process.pid) if to_file else errors

        def hangs() -> bool:
            assert process.poll() is None
            process.send_signal(SIGNAL)
            return "in hang_in_c" in file.read_text()  # at first it may not hang yet

        wait_until(hangs, file.read_text)
        process.kill()
