"""Waits of the trainer: calls that are repeated while Redis is unavailable, and other processes that fall silent."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from prometheus_client import Counter

from forage_common.errors import DiskFullError, ForageError, UnavailableError
from forage_common.stop import Stop
from forage_common.telemetry.health import Health
from forage_common.telemetry.logs import get_logger
from forage_common.telemetry.waits import Wait, waiting

T = TypeVar("T")
REDIS_WAITS = Counter("forage_trainer_redis_waits_total", "Calls that found Redis unavailable and were repeated")
CALL_TIMEOUT_S = 4.0
"""Time limit of one call to Redis: short, so that a stop request is noticed while the server is unavailable."""
_RETRY_INTERVAL_S = 0.5
DISK_WAITS = Counter("forage_trainer_disk_waits_total", "Writes that found the disk full and were repeated")
DISK_PATIENCE_S = 600.0
"""After so long with a full disk the trainer ends, and its supervisor starts it again."""
_DISK_INTERVAL_S = 2.0
_WHY_UNLIMITED = "the run is in Redis: nothing else can be done; a stop request ends it"


class CollectiveTimeoutError(ForageError):
    """A process of the trainer waited too long for another one."""


class DiskRetry:
    """Repeats a write while the disk is full, and reports that in the log and on the health endpoint."""

    def __init__(self, stop: Stop, health: Health) -> None:
        self._stop = stop
        self._health = health

    def __call__(self, write: Callable[[], T]) -> T:
        """Return the result of `write`, which leaves nothing behind when it fails.

        Raises:
            DiskFullError: the disk was full for `DISK_PATIENCE_S`.
            Stopped: the process was asked to stop meanwhile.
        """
        began = 0.0
        with ExitStack() as waits:
            wait: Wait | None = None
            while True:
                try:
                    result = write()
                except DiskFullError as error:
                    began = began or time.monotonic()  # writing a checkpoint may itself take longer than the patience
                    waited = round(time.monotonic() - began, 1)
                    if waited > DISK_PATIENCE_S:
                        raise
                    wait = wait or waits.enter_context(
                        waiting("room on the disk", on="the disk of run.dir", limit_s=DISK_PATIENCE_S)
                    )
                    wait.detail = str(error)
                    DISK_WAITS.inc()
                    self._health.wait_for("disk", str(error))
                    get_logger().warning("disk_full", waited_s=waited, reason=str(error))
                    self._stop.sleep(_DISK_INTERVAL_S)
                    continue
                if wait is not None:
                    self._health.mark_ready("disk")
                    get_logger().info("disk_has_room", waited_s=round(time.monotonic() - began, 1))
                return result


class RedisRetry:
    """Repeats a call for as long as Redis is unavailable, and reports that in the log and on the health endpoint.

    disk: does the same with writes while the disk is full.
    """

    def __init__(self, stop: Stop, health: Health) -> None:
        self.disk = DiskRetry(stop, health)
        self._stop = stop
        self._health = health

    def __call__(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, however long Redis is unavailable.

        Raises:
            Stopped: the process was asked to stop meanwhile.
        """
        began = time.monotonic()
        with ExitStack() as waits:
            wait: Wait | None = None
            while True:
                self._stop.check()
                try:
                    result = call()
                except UnavailableError as error:
                    wait = wait or waits.enter_context(
                        waiting("a call of Redis", on="redis", limit_s=None, why_unlimited=_WHY_UNLIMITED)
                    )
                    wait.detail = str(error)
                    REDIS_WAITS.inc()
                    self._health.wait_for("redis", str(error))
                    waited = round(time.monotonic() - began, 1)
                    get_logger().warning("redis_unavailable", waited_s=waited, reason=str(error))
                    self._stop.sleep(_RETRY_INTERVAL_S)
                    continue
                if wait is not None:
                    self._health.mark_ready("redis")
                    get_logger().info("redis_available", waited_s=round(time.monotonic() - began, 1))
                return result
