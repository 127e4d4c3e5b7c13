"""Waiting that can be ended: a stop flag set by SIGTERM, and calls to Redis that are repeated while it is away."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from prometheus_client import Counter

from forage_common.errors import InterruptedWorkError, UnavailableError
from forage_common.telemetry.health import Health
from forage_common.telemetry.logs import get_logger

T = TypeVar("T")
REDIS_AWAY = Counter("forage_trainer_redis_waits_total", "Calls that found Redis away and were repeated")
PATIENCE_S = 4.0
"""Of one call to Redis: short, so that a stop is noticed while the server is away."""


class Stopped(InterruptedWorkError):
    """The process was asked to stop; what it leaves is resumed by the next start."""


class Stop:
    """A flag that long waits look at. Thread-safe.

    Not an Event: set by a handler that interrupts its own `wait`, it can wait for the lock that `wait` holds.
    """

    def __init__(self) -> None:
        self._requested = False
        self._wake: SimpleQueue[None] = SimpleQueue()

    def request(self) -> None:
        self._requested = True
        self._wake.put(None)

    @property
    def is_requested(self) -> bool:
        return self._requested

    def on_signals(self) -> None:
        """Set the flag on SIGTERM (main thread only)."""
        signal.signal(signal.SIGTERM, lambda *_: self.request())

    def check(self) -> None:
        """A safe point.

        Raises:
            Stopped: the flag is set.
        """
        if self._requested:
            raise Stopped("asked to stop")

    def sleep(self, seconds: float) -> None:
        """Sleep, but not past a stop."""
        with contextlib.suppress(Empty):
            self._wake.get(timeout=seconds)
            self._wake.put(None)  # for whoever else sleeps
        self.check()


class Insist:
    """Repeats a call for as long as Redis is away, saying so in the log and on the health endpoint."""

    def __init__(self, stop: Stop, health: Health) -> None:
        self._stop = stop
        self._health = health

    def __call__(self, call: Callable[[], T]) -> T:
        """The result of `call`, however long Redis takes to come back.

        Raises:
            Stopped: the process was asked to stop meanwhile.
        """
        began = time.monotonic()
        failed = False
        while True:
            self._stop.check()
            try:
                result = call()
            except UnavailableError as error:
                failed = True
                REDIS_AWAY.inc()
                self._health.wait_for("redis", str(error))
                waited = round(time.monotonic() - began, 1)
                get_logger().warning("redis_away", waited_s=waited, reason=str(error))
                self._stop.sleep(0.5)
                continue
            if failed:
                self._health.mark_ready("redis")
                get_logger().info("redis_back", waited_s=round(time.monotonic() - began, 1))
            return result
