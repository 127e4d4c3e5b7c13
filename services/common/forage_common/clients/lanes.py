"""Many kept-alive connections to one host, each in an httpx client of its own.

A client of httpx looks at all of its connections, and at all requests that wait for one, whenever a request begins or
ends: with thousands of searches at once that takes longer than all else that a search costs. Here requests wait
outside, in their order, and each client has one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx


class Lanes:
    """Up to `most` clients, made when they are needed; the one that was used last is used next.

    Args:
        make: makes a client of one connection.
    """

    def __init__(self, make: Callable[[], httpx.AsyncClient], most: int) -> None:
        self._make = make
        self._room = asyncio.Semaphore(most)
        self._free: list[httpx.AsyncClient] = []
        self._all: list[httpx.AsyncClient] = []

    @asynccontextmanager
    async def take(self) -> AsyncIterator[httpx.AsyncClient]:
        """Have a client for the length of the block; waits for one where all are in use."""
        async with self._room:
            if not self._free:
                self._free.append(self._make())
                self._all.append(self._free[-1])
            lane = self._free.pop()
            try:
                yield lane
            finally:
                self._free.append(lane)

    async def close(self) -> None:
        """Close the connections."""
        for lane in self._all:
            await lane.aclose()
