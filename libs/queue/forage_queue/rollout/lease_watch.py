"""The engine's side of shifts at GPUs that it shares with the trainer: when it must sleep, and when it may wake.

The trainer sets whose shift it is. In its own an engine frees its memory and says so; the trainer waits for the word of
every engine that lives, and computes. An engine counts as alive, and as using memory, from its first word, which comes
before it looks whose shift it is: so none takes memory unnoticed while the trainer computes. Words name the shift that
they answer, so that an old one never stands for a new one.

A trainer that dies in its shift leaves engines asleep, until it is started again or has been silent for `LEASE_S`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from forage_proto.v1.trajectory_pb2 import Replica, Shift
from forage_queue.rollout.redis_threads import call_in_thread
from forage_queue.streams.client import ANNOUNCED, NEVER, StreamClient
from forage_runtime.errors import UnavailableError
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import waiting

log = get_logger()
LEASE_S = 60.0
"""A trainer that gave no sign of life for so long in its shift is gone, and the shift is the engines'."""
LOOK_S = 5.0
RETRY_INTERVAL_S = 1.0
HEARTBEAT_INTERVAL_S = 5.0


class LeaseWatch:
    """Whose shift it is, as one engine sees it. One task at a time may use it.

    Args:
        name: of the engine's replica.
    """

    def __init__(self, streams: StreamClient, name: str) -> None:
        self._streams = streams
        self._name = name
        self._seen: Shift | None = None
        self._seen_at = time.monotonic()

    async def read_trainers(self) -> Shift | None:
        """The trainer's shift, in which this engine must sleep; None in the engines'.

        Raises:
            UnavailableError: Redis is unavailable: an engine that sleeps goes on sleeping.
        """
        try:
            shift = await call_in_thread(self._streams.read_shift)
        except UnavailableError:
            self._seen_at = time.monotonic()  # its signs of life cannot be seen either
            raise
        now = time.monotonic()
        if shift is None and self._seen is not None and self._seen.is_trainers:
            # The server has lost its data. A trainer that lives says again whose shift it is.
            return self._seen if now - self._seen_at < LEASE_S else None
        if shift is None or not shift.is_trainers:
            self._seen, self._seen_at = shift, now
            return None
        if shift != self._seen:
            self._seen, self._seen_at = shift, now
        elif now - self._seen_at > LEASE_S:
            ended = Shift(epoch=shift.epoch, number=shift.number + 1)
            if await call_in_thread(self._streams.replace_shift, shift, ended):
                log.warning("trainer_is_silent", silent_s=LEASE_S, epoch=shift.epoch, shift=shift.number)
                return None
        return shift

    async def wait_for_engines(self) -> None:
        """Return once it is the engines' shift, for an engine that has not taken any memory yet."""
        seen, reported = NEVER, Replica(out_of_service=True)
        why = "it ends with the trainer's step, or a minute after the trainer"
        with waiting("the engines' shift at shared GPUs", on="trainer", limit_s=None, why_unlimited=why):
            while True:
                try:
                    await self._report(reported)
                    shift = await self.read_trainers()
                    if shift is None:
                        return
                    if not is_same(shift, reported.asleep):
                        reported = Replica(out_of_service=True, asleep=name_shift(shift))
                        continue
                    seen = await call_in_thread(self._streams.await_change, ANNOUNCED, seen, LOOK_S)
                except UnavailableError as error:
                    log.warning("waiting_for_redis", detail=str(error))
                    await asyncio.sleep(RETRY_INTERVAL_S)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Say in the block, which may hold up the event loop, that this engine takes memory and serves nothing yet."""
        ended = threading.Event()
        thread = threading.Thread(target=self._report_until, args=(ended,), name="starting-engine", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()  # wait: the thread has nothing else to do

    def _report_until(self, ended: threading.Event) -> None:
        while True:
            with suppress(UnavailableError):
                self._streams.acknowledge_policy(self._name, Replica(out_of_service=True))
            if ended.wait(HEARTBEAT_INTERVAL_S):  # wait: pause between two signs of life
                return

    async def _report(self, replica: Replica) -> None:
        await call_in_thread(self._streams.acknowledge_policy, self._name, replica)


def name_shift(shift: Shift) -> Shift:
    """A shift without what changes while it lasts."""
    return Shift(epoch=shift.epoch, number=shift.number, is_trainers=shift.is_trainers)


def is_same(shift: Shift, other: Shift) -> bool:
    return name_shift(shift) == name_shift(other)
