"""Leases of groups on the served policy: a draining update waits for them, and new groups wait for the update."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forage_common.telemetry.logs import get_logger

log = get_logger()


class Leases:
    """One lease a name, held from its first generation until it is released.

    Args:
        limit_s: a lease expires so long after it was acquired: its holder must have died, and would block updates.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._held: dict[str, float] = {}  # name → time of acquisition
        self._drains = 0  # that wait or are under way; while there are any no new lease is given
        self._changed = asyncio.Condition()

    async def acquire(self, name: str) -> None:
        """Acquire the lease, or keep it; waits while an update is under way."""
        if name in self._held:
            return  # later turns of a group never wait: the update waits for the group
        async with self._changed:
            await self._changed.wait_for(lambda: not self._drains)
            self._held[name] = time.monotonic()

    async def release(self, name: str) -> None:
        """Release the lease; a name without one is ignored."""
        if name in self._held:
            async with self._changed:
                self._held.pop(name, None)
                self._changed.notify_all()

    @asynccontextmanager
    async def drain(self) -> AsyncIterator[None]:
        """Wait until no lease is held; new ones are given after the `with` block."""
        async with self._changed:
            self._drains += 1
            try:
                while self._held:
                    await self._wait_for_release()
            except BaseException:
                self._end_drain()
                raise
        try:
            yield
        finally:
            async with self._changed:
                self._end_drain()

    async def _wait_for_release(self) -> None:
        timeout_s = max(self._held.values()) + self._limit_s - time.monotonic()
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            log.warning("leases_void", count=len(self._held), after_s=self._limit_s)
            self._held.clear()

    def _end_drain(self) -> None:
        self._drains -= 1
        self._changed.notify_all()
