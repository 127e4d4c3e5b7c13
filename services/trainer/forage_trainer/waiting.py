"""Waiting that can be ended: a stop flag set by SIGTERM, and calls to Redis that are repeated while it is away."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from prometheus_client import Counter

from forage_common.errors import InterruptedWorkError, UnavailableError
from forage_common.telemetry import Health, get_logger

T = TypeVar("T")
REDIS_AWAY = Counter("forage_trainer_redis_waits_total", "Calls that found Redis away and were repeated")
PATIENCE_S = 4.0
"""Of one call to Redis: short, so that a stop is noticed while the server is away."""


class Stopped(InterruptedWorkError):
    """The process was asked to stop; what it leaves is resumed by the next start."""


class Stop:
    """A flag that long waits look at. Thread-safe."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def request(self) -> None:
        self._event.set()

    @property
    def is_requested(self) -> bool:
        return self._event.is_set()

    def on_signals(self) -> None:
        """Set the flag on SIGTERM (main thread only)."""

        def handle(_signal: int, _frame: FrameType | None) -> None:
            self._event.set()

        signal.signal(signal.SIGTERM, handle)

    def check(self) -> None:
        """A safe point.

        Raises:
            Stopped: the flag is set.
        """
        if self._event.is_set():
            raise Stopped("asked to stop")

    def sleep(self, seconds: float) -> None:
        """Sleep, but not past a stop."""
        self._event.wait(seconds)
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
                self._health.have("redis")
                get_logger().info("redis_back", waited_s=round(time.monotonic() - began, 1))
            return result
