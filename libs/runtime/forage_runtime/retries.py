"""Calls that the trainer repeats while Redis, the disk or the storage of policies is unavailable."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TypeVar

from prometheus_client import Counter

from forage_runtime.errors import DiskFullError, UnavailableError
from forage_runtime.files.remote import StorageError
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import Wait, waiting

T = TypeVar("T")
REDIS_WAITS = Counter("forage_trainer_redis_waits_total", "Calls that found Redis unavailable and were repeated")
CALL_TIMEOUT_S = 4.0
"""Time limit of one call to Redis: short, so that a stop request is noticed while the server is unavailable."""
_RETRY_INTERVAL_S = 0.5
DISK_WAITS = Counter("forage_trainer_disk_waits_total", "Writes that found the disk full and were repeated")
DISK_PATIENCE_S = 600.0
"""After so long with a full disk the trainer ends, and its supervisor starts it again."""
_DISK_INTERVAL_S = 2.0
STORAGE_WAITS = Counter("forage_trainer_storage_waits_total", "Calls that found trainer.publish.uri unavailable")
_WHY_UNLIMITED = "the run is in Redis: nothing else can be done; a stop request ends it"


class _Retry(ABC):
    """Repeats a call while something is unavailable, and reports that in the log and on the health endpoint.

    error: what the call raises then. topic: on the health endpoint. events: in the log, of its beginning and its end.
    """

    error: type[Exception]
    topic: str
    events: tuple[str, str]
    counter: Counter

    def __init__(self, stop: Stop, health: Health) -> None:
        self._stop = stop
        self._health = health

    @property
    def is_stopping(self) -> bool:
        """Whether the process was asked to stop, so that the next call raises `Stopped`."""
        return self._stop.is_requested

    def get_limits(self) -> tuple[float, float | None]:
        """Seconds between two calls, and seconds until it is given up; None: never."""
        return _RETRY_INTERVAL_S, None

    @abstractmethod
    def name_wait(self) -> AbstractContextManager[Wait]:
        """Name the wait."""

    def __call__(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, which leaves nothing behind when it fails.

        Raises:
            Stopped: the process was asked to stop meanwhile.
        """
        began = 0.0
        with ExitStack() as waits:
            wait: Wait | None = None
            while True:
                try:
                    result = call()
                except self.error as error:
                    interval_s, patience_s = self.get_limits()
                    began = began or time.monotonic()  # a call may itself take longer than the patience
                    waited = round(time.monotonic() - began, 1)
                    if patience_s is not None and waited > patience_s:
                        raise
                    wait = wait or waits.enter_context(self.name_wait())
                    wait.detail = str(error)
                    self.counter.inc()
                    self._health.wait_for(self.topic, str(error))
                    get_logger().warning(self.events[0], waited_s=waited, reason=str(error))
                    self._stop.sleep(interval_s)  # wait: named just above
                    continue
                if wait is not None:
                    self._health.mark_ready(self.topic)
                    get_logger().info(self.events[1], waited_s=round(time.monotonic() - began, 1))
                return result


class DiskRetry(_Retry):
    """Repeats a write while the disk is full; raises `DiskFullError` after `DISK_PATIENCE_S`."""

    error, topic, events = DiskFullError, "disk", ("disk_full", "disk_has_room")
    counter = DISK_WAITS

    def get_limits(self) -> tuple[float, float | None]:
        return _DISK_INTERVAL_S, DISK_PATIENCE_S

    def name_wait(self) -> AbstractContextManager[Wait]:
        return waiting("room on the disk", on="the disk of run.dir", limit_s=DISK_PATIENCE_S)


class StorageRetry(_Retry):
    """Repeats a call while the address of `trainer.publish.uri` is unavailable."""

    error, topic, events = StorageError, "storage", ("storage_unavailable", "storage_available")
    counter = STORAGE_WAITS

    def name_wait(self) -> AbstractContextManager[Wait]:
        why = "without it no engine gets the policy; a stop request ends it"
        return waiting("the storage of policies", on="trainer.publish.uri", limit_s=None, why_unlimited=why)


class RedisRetry(_Retry):
    """Repeats a call for as long as Redis is unavailable."""

    error, topic, events = UnavailableError, "redis", ("redis_unavailable", "redis_available")
    counter = REDIS_WAITS

    def __call__(self, call: Callable[[], T]) -> T:
        """As `_Retry`, but where the process is to stop the call is not made."""

        def check_and_call() -> T:
            self._stop.check()
            return call()

        return super().__call__(check_and_call)

    def name_wait(self) -> AbstractContextManager[Wait]:
        return waiting("a call of Redis", on="redis", limit_s=None, why_unlimited=_WHY_UNLIMITED)


class Retries:
    """What a trainer repeats calls with: of Redis, of the disk of its run, of the storage of policies."""

    def __init__(self, stop: Stop, health: Health) -> None:
        self.redis = RedisRetry(stop, health)
        self.disk = DiskRetry(stop, health)
        self.storage = StorageRetry(stop, health)
