"""Many asynchronous calls with bounded concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

from prometheus_client import Gauge

from forage_runtime.telemetry.waits import Wait

T = TypeVar("T")
R = TypeVar("R")
QUEUED = Gauge("forage_common_calls_queued", "Calls that wait until this process has a connection free", ["service"])


class Slots:
    """The calls to a service that this process makes at a time. Further ones wait in their order, for one event loop.

    That wait says nothing about the service: neither a time limit nor a circuit counts it.
    """

    def __init__(self, service: str, most: int) -> None:
        self._free = asyncio.Semaphore(most)
        self._queued = QUEUED.labels(service)

    @asynccontextmanager
    async def take(self, wait: Wait) -> AsyncIterator[None]:
        """Have a slot for the length of the block.

        Args:
            wait: what waits; it has another name and no limit until there is a slot.
        """
        if self._free.locked():
            what, limit_s = wait.what, wait.limit_s
            wait.what, wait.limit_s = "a free connection", None
            wait.why_unlimited = "calls before it end within their limits"
            with self._queued.track_inprogress():
                await self._free.acquire()
            wait.what, wait.limit_s, wait.why_unlimited = what, limit_s, ""
        else:
            await self._free.acquire()
        try:
            yield
        finally:
            self._free.release()


async def map_concurrently(
    items: Iterable[T], work: Callable[[T], Awaitable[R]], limit: int
) -> AsyncGenerator[tuple[T, R], None]:
    """Yield (item, result) in order of completion, with at most `limit` calls at a time; items are read lazily.

    The first failure, and closing the generator early, cancels the calls in progress.
    """
    source = iter(items)
    running: dict[asyncio.Future[R], T] = {}
    try:
        while True:
            while len(running) < limit:
                try:
                    item = next(source)
                except StopIteration:
                    break
                running[asyncio.ensure_future(work(item))] = item
            if not running:
                return
            done, _ = await asyncio.wait(
                running, return_when=asyncio.FIRST_COMPLETED
            )  # wait: each task has a time limit of its own
            for task in done:
                yield running.pop(task), task.result()
    finally:
        for task in running:
            task.cancel()
