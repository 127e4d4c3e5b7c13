"""Refuses what no unit test may do while it runs, wherever the call is made: use the network, start a process, sleep.

scripts/check_tests.py finds the same in the sources, as far as sources show it.
"""

from __future__ import annotations

import asyncio
import multiprocessing.process
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

COSTS = {
    "socket.connect": "connects a socket",
    "socket.bind": "binds a socket",
    "subprocess.Popen": "starts a process",
    "os.fork": "starts a process",
    "os.posix_spawn": "starts a process",
}
"""Audit event of Python → what the test does."""
_costs: list[str] | None = None
"""What the running test did; None outside of tests, as while modules are imported."""


class TooCostly(AssertionError):
    """A unit test did what only the other kinds may do."""


def _refuse(what: str) -> None:
    if _costs is not None:
        _costs.append(what)
        raise TooCostly(f"a unit test {what}: move it to tests/component")


def _audit(event: str, _: tuple[Any, ...]) -> None:
    if event in COSTS:
        _refuse(COSTS[event])


sys.addaudithook(_audit)


@pytest.fixture(autouse=True)
def refuse_costs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that costs what its kind does not allow, also where the code under test swallows the error."""
    global _costs
    sleep, async_sleep, start = time.sleep, asyncio.sleep, multiprocessing.process.BaseProcess.start

    def refuse_sleep(seconds: float) -> None:
        if seconds > 0:
            _refuse(f"sleeps for {seconds:g} s")
        sleep(seconds)

    async def refuse_async_sleep(delay: float, result: Any = None) -> Any:
        if delay > 0:
            _refuse(f"sleeps for {delay:g} s")
        return await async_sleep(delay, result)

    def refuse_start(process: multiprocessing.process.BaseProcess) -> None:
        _refuse("starts a process")
        start(process)

    monkeypatch.setattr(time, "sleep", refuse_sleep)
    monkeypatch.setattr(asyncio, "sleep", refuse_async_sleep)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse_start)
    costs = _costs = []
    yield
    _costs = None
    assert not costs, f"a unit test {', '.join(sorted(set(costs)))}: move it to tests/component"
