"""Who runs under the policy that is served: a drained update waits for them, and newcomers wait for the update."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forage_common.telemetry.logs import get_logger

log = get_logger()


class Leases:
    """One lease a name, from its first generation until it is released.

    Args:
        limit_s: a lease that was not released so long after it was opened is void; its owner must have died.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._held: dict[str, float] = {}  # → when it was opened
        self._closed = 0
        self._changed = asyncio.Condition()

    async def open(self, name: str) -> None:
        """Take the lease, or keep it; waits while an update is under way."""
        if name in self._held:
            return
        async with self._changed:
            await self._changed.wait_for(lambda: not self._closed)
            self._held[name] = time.monotonic()

    async def release(self, name: str) -> None:
        """Give the lease back; a name without one is ignored."""
        if name in self._held:
            async with self._changed:
                self._held.pop(name, None)
                self._changed.notify_all()

    @asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Nobody holds a lease inside; who asks for one waits until the end."""
        async with self._changed:
            self._closed += 1
            try:
                while self._held:
                    await self._next_release()
            except BaseException:
                self._open_again()
                raise
        try:
            yield
        finally:
            async with self._changed:
                self._open_again()

    async def _next_release(self) -> None:
        patience_s = max(self._held.values()) + self._limit_s - time.monotonic()
        try:
            await asyncio.wait_for(self._changed.wait(), patience_s)
        except TimeoutError:
            log.warning("leases_void", count=len(self._held), after_s=self._limit_s)
            self._held.clear()

    def _open_again(self) -> None:
        self._closed -= 1
        self._changed.notify_all()
