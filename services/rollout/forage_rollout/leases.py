"""Who runs under the policy that is served: a drained update waits for them, and newcomers wait for the update."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forage_common.telemetry import get_logger

log = get_logger()


class Leases:
    """One lease a name, from its first generation until it is released.

    Args:
        limit_s: a lease that is not released within so long of an update's begin is void.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._held: set[str] = set()
        self._closed = 0
        self._changed = asyncio.Condition()

    async def open(self, name: str) -> None:
        """Take the lease, or keep it; waits while an update is under way."""
        if name in self._held:
            return
        async with self._changed:
            await self._changed.wait_for(lambda: not self._closed)
            self._held.add(name)

    async def release(self, name: str) -> None:
        """Give the lease back; a name without one is ignored."""
        if name in self._held:
            async with self._changed:
                self._held.discard(name)
                self._changed.notify_all()

    @asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Nobody holds a lease inside; who asks for one waits until the end."""
        async with self._changed:
            self._closed += 1
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: not self._held), self._limit_s)
            except TimeoutError:
                log.warning("leases_void", count=len(self._held), after_s=self._limit_s)
                self._held.clear()
            except BaseException:
                self._open_again()
                raise
        try:
            yield
        finally:
            async with self._changed:
                self._open_again()

    def _open_again(self) -> None:
        self._closed -= 1
        self._changed.notify_all()
