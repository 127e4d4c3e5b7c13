"""Many asynchronous calls with bounded concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


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
