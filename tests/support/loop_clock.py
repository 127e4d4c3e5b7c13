"""The clock of the running event loop, which tests put forward: a time limit of an hour expires when they say so."""

from __future__ import annotations

import asyncio

import pytest


class LoopClock:
    """Goes on by itself, and further by `skip`."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        real, self._skipped_s = loop.time, 0.0
        loop.time = lambda: real() + self._skipped_s  # type: ignore[method-assign]

    def skip(self, seconds: float) -> None:
        """Let the time limits and sleeps of the loop that are due by then end in its next round."""
        self._skipped_s += seconds


@pytest.fixture
async def loop_clock() -> LoopClock:
    return LoopClock()
