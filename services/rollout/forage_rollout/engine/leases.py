"""Leases of groups on the served policy: a draining update waits for them, and new groups wait for the update."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import waiting as named
from forage_weights.rollout.policy import NotServingError

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
        self._waiting: dict[str, set[object]] = {}  # name → those that wait for its lease
        self._changed = asyncio.Condition()

    async def acquire(self, name: str) -> None:
        """Acquire the lease, or keep it; waits while an update is under way.

        Raises:
            NotServingError: the name was released meanwhile; nobody would release a lease that was given now.
        """
        if name in self._held:
            return  # later turns of a group never wait: the update waits for the group
        async with self._changed:
            waiter = object()
            waiting = self._waiting.setdefault(name, set())
            waiting.add(waiter)
            try:
                with named("an update of the weights", on="this engine", limit_s=self._limit_s):
                    await self._changed.wait_for(lambda: not self._drains or waiter not in waiting)
                if waiter not in waiting:
                    raise NotServingError(f"{name} was released before it could be served")
                self._held.setdefault(name, time.monotonic())
            finally:
                waiting.discard(waiter)
                if not waiting and self._waiting.get(name) is waiting:
                    del self._waiting[name]

    async def release(self, name: str) -> None:
        """Release the lease, and end the waiting for it; a name without either is ignored."""
        if name in self._held or name in self._waiting:
            async with self._changed:
                self._held.pop(name, None)
                self._waiting.pop(name, set()).clear()
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
            held = f"{len(self._held)} leases are held"
            with named("groups to release the old policy", on="agent", limit_s=timeout_s, detail=held):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
        except TimeoutError:
            log.warning("leases_void", count=len(self._held), after_s=self._limit_s)
            self._held.clear()

    def _end_drain(self) -> None:
        self._drains -= 1
        self._changed.notify_all()
