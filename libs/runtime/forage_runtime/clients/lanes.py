"""Many kept-alive connections to one host, each in an httpx client of its own.

A client of httpx looks at all of its connections, and at all requests that wait for one, whenever a request begins or
ends: with thousands of searches at once that takes longer than all else that a search costs. Here each client has one
request, and `Slots` bounds how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx


class Lanes:
    """Clients, made when they are needed; the one that was used last is used next.

    Args:
        make: makes a client of one connection.
    """

    def __init__(self, make: Callable[[], httpx.AsyncClient]) -> None:
        self._make = make
        self._free: list[httpx.AsyncClient] = []
        self._all: list[httpx.AsyncClient] = []

    @contextmanager
    def take(self) -> Iterator[httpx.AsyncClient]:
        """Have a client for the length of the block."""
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
