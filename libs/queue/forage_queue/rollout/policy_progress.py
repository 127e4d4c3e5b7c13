"""Which policy is announced and which engines have reached it: read once for all groups of a dispatcher."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Set
from contextlib import suppress
from typing import Any, NoReturn

from forage_proto.v1.trajectory_pb2 import Policy, Replica
from forage_queue.streams.client import LIVELY_S, NEVER, SERVED, StreamClient
from forage_runtime.errors import ForageError
from forage_runtime.telemetry.logs import get_logger

log = get_logger()
AskEngines = Callable[[], Awaitable[Mapping[str, Replica]]]
"""Asks the engines that run: the name of each → what it serves and refuses."""
CallRedis = Callable[..., Awaitable[Any]]
WATCH_S = 5.0
"""The state is read after each change, and after so long in case that a change was missed."""
PACE_S = 0.02
"""Between two reads: the changes of many engines that come at once are read together."""
DOUBT_S = 1.0
MAX_DOUBT_S = 4.0
ASK_TIMEOUT_S = 5.0
NOT_REACHED = -1


class PolicyProgress:
    """What replicas say in Redis of the policies that they serve, which `watch` reads after each change.

    Engines themselves are asked only where one lags behind for longer than `DOUBT_S`, and before the first answer: it
    may have died, or left the service. An engine counts from when it was heard of in either way until it is found not
    to run, or gives no sign of life. One out of service gets no generations and holds nobody back.
    """

    def __init__(self, streams: StreamClient, call_redis: CallRedis, ask_engines: AskEngines) -> None:
        """
        Args:
            call_redis: calls a function of the client in a thread, repeatedly while Redis is unavailable.
        """
        self._streams = streams
        self._call_redis = call_redis
        self._ask_engines = ask_engines
        self._announced: Policy | None = None
        self._listed: Mapping[str, Replica] = {}
        self._running: Mapping[str, Replica] | None = None
        self._gone: Set[str] = frozenset()
        self._reached = NOT_REACHED
        self._read_at = self._asked_at = 0.0
        self._doubt_s = DOUBT_S
        self._reading = asyncio.Lock()
        self._changed = asyncio.Event()

    async def watch(self) -> NoReturn:
        """Read the state at each change, for as long as the dispatcher works."""
        seen = NEVER
        while True:
            try:
                seen = await self._call_redis(self._streams.await_change, SERVED, seen, WATCH_S)
                await self._read(time.monotonic())
            except ForageError as error:  # a server that refuses reads for a while ends no group
                log.warning("served_not_read", detail=str(error))
                await asyncio.sleep(DOUBT_S)  # wait: pause before another attempt
            await asyncio.sleep(PACE_S)  # wait: coalesces changes

    async def wait_until_served(self, version: int, timeout_s: float) -> bool:
        """Whether every engine in service has reached this version of the announced epoch, after waiting for it.

        Versions of two epochs cannot be compared, and the latest trainer counts: a policy of another epoch than the
        announced one counts as older, whatever its version.
        """
        began = time.monotonic()
        await self._read(began)
        while version > self._reached and (now := time.monotonic()) < began + timeout_s:
            due = max(began, self._asked_at) + self._doubt_s if self._asked_at else now
            if now >= due:
                await self._ask()
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.001, min(began + timeout_s, due) - now)):
                    await self._changed.wait()  # wait: named by the dispatcher
        return version <= self._reached

    async def _read(self, asked_at: float) -> None:
        """Return once the state was read after the given time, for all who asked before."""
        async with self._reading:
            if self._read_at >= asked_at:
                return
            began = time.monotonic()
            announced = await self._call_redis(self._streams.read_policy)
            listed = await self._call_redis(self._streams.read_replicas, LIVELY_S)
            if announced != self._announced:
                self._gone = frozenset()  # an engine that was starting when it was found not to run may be running now
            if announced != self._announced or listed.keys() - self._listed.keys():
                self._doubt_s = DOUBT_S
            self._announced, self._listed, self._read_at = announced, listed, began
            self._update()

    async def _ask(self) -> None:
        """Ask the engines that run; less and less often, since loading may take long."""
        self._asked_at, self._doubt_s = time.monotonic(), min(2 * self._doubt_s, MAX_DOUBT_S)
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                self._running = await self._ask_engines()
        except Exception as error:  # noqa: BLE001 - protects the prompt from an engine that is restarting
            log.warning("waiting_for_engine", detail=f"{type(error).__name__}: {error}")
        else:
            self._gone = self._listed.keys() - self._running.keys()
            self._update()

    def _update(self) -> None:
        """Find the version that every engine in service has reached, and wake the groups if it is another one."""
        before, self._reached = self._reached, NOT_REACHED
        if self._announced is not None and self._running is not None:
            listed = {name: one for name, one in self._listed.items() if name not in self._gone}
            served = [one.serving for one in {**self._running, **listed}.values() if not one.out_of_service]
            epoch = self._announced.epoch
            # A replica without a policy has one of epoch 0 here; a trainer's epochs begin at 1.
            self._reached = min((p.version if p.epoch == epoch else NOT_REACHED for p in served), default=NOT_REACHED)
        if self._reached != before:
            self._changed.set()
            self._changed = asyncio.Event()
