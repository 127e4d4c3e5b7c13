"""Calls that are repeated while Redis is unavailable, until a stop is requested."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from prometheus_client import Counter

from forage_common.errors import UnavailableError
from forage_common.stop import Stop
from forage_common.telemetry.health import Health
from forage_common.telemetry.logs import get_logger

T = TypeVar("T")
REDIS_WAITS = Counter("forage_trainer_redis_waits_total", "Calls that found Redis unavailable and were repeated")
CALL_TIMEOUT_S = 4.0
"""Time limit of one call to Redis: short, so that a stop request is noticed while the server is unavailable."""
_RETRY_INTERVAL_S = 0.5


class RedisRetry:
    """Repeats a call for as long as Redis is unavailable, and reports that in the log and on the health endpoint."""

    def __init__(self, stop: Stop, health: Health) -> None:
        self._stop = stop
        self._health = health

    def __call__(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, however long Redis is unavailable.

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
                REDIS_WAITS.inc()
                self._health.wait_for("redis", str(error))
                waited = round(time.monotonic() - began, 1)
                get_logger().warning("redis_unavailable", waited_s=waited, reason=str(error))
                self._stop.sleep(_RETRY_INTERVAL_S)
                continue
            if failed:
                self._health.mark_ready("redis")
                get_logger().info("redis_available", waited_s=round(time.monotonic() - began, 1))
            return result
