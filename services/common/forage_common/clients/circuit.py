"""A circuit breaker: an address that keeps failing is left alone until a single probe has gone through."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import httpx
from prometheus_client import Counter, Gauge

from forage_common.errors import ForageError

FAILURES = 5
"""Attempts in a row that must fail before the circuit opens."""

OPEN_S = 1.0
"""Pause before a probe: a service that was restarted is back in seconds."""

OPENED = Counter("forage_common_circuits_opened_total", "Circuits opened by failures in a row", ["service"])
OPEN = Gauge("forage_common_circuits_open", "Circuits that are open", ["service"])

_GRPC_AWAY = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
_HTTP_AWAY = {502, 503, 504}


class CircuitOpenError(ForageError):
    """The attempt was not made; `retry_after_s` says when one may be."""

    def __init__(self, service: str, address: str, retry_after_s: float) -> None:
        super().__init__(f"the {service} at {address} kept failing and is left alone for {retry_after_s:.1f} s")
        self.retry_after_s = retry_after_s


def is_unavailable(error: BaseException) -> bool:
    """Whether an error says that nobody answers. A refusal is an answer, and so is a request to come back later."""
    if isinstance(error, grpc.RpcError):
        return error.code() in _GRPC_AWAY
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _HTTP_AWAY and "retry-after" not in error.response.headers
    return isinstance(error, httpx.TransportError | TimeoutError)


class Circuit:
    """Guards the attempts to call one address. For use on one event loop.

    Closed until `failures` attempts in a row have failed. Then open: attempts are refused for `open_s`, after which one
    at a time is let through. If that one succeeds the circuit closes, if it fails the pause begins anew.
    """

    def __init__(
        self,
        service: str,
        address: str,
        failures: int = FAILURES,
        open_s: float = OPEN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.service = service
        self.address = address
        self._most = failures
        self._open_s = open_s
        self._clock = clock
        self._failures = 0
        self._probe_at: float | None = None
        self._probing = False
        for metric in (OPEN, OPENED):
            metric.labels(service)  # shown from the start, as 0

    @property
    def is_open(self) -> bool:
        """Whether attempts are refused, but for a probe."""
        return self._probe_at is not None

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Make an attempt inside; how it ends is remembered.

        Raises:
            CircuitOpenError: the address is being left alone.
        """
        probe = self._enter()
        try:
            yield
        except Exception as error:
            if is_unavailable(error):
                self._failed(probe)
            else:
                self._close()
            raise
        else:
            self._close()
        finally:  # also of a probe that was cancelled, from which nothing was learnt
            self._probing = self._probing and not probe

    def _enter(self) -> bool:
        if self._probe_at is None:
            return False
        wait_s = self._probe_at - self._clock()
        if self._probing or wait_s > 0:
            raise CircuitOpenError(self.service, self.address, max(0.0, wait_s))
        self._probing = True
        return True

    def _failed(self, probe: bool) -> None:
        self._failures += 1
        if probe or (self._probe_at is None and self._failures >= self._most):
            if self._probe_at is None:
                OPEN.labels(self.service).inc()
            self._probe_at = self._clock() + self._open_s
            OPENED.labels(self.service).inc()

    def _close(self) -> None:
        self._failures = 0
        if self._probe_at is not None:
            OPEN.labels(self.service).dec()
        self._probe_at = None
