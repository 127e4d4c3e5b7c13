"""A circuit breaker: an address that keeps failing gets no more calls until a single trial call succeeds."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import httpx
from prometheus_client import Counter, Gauge

from forage_runtime.clients.reasons import describe_error
from forage_runtime.errors import ForageError
from forage_runtime.text.redaction import redact_url

FAILURES = 5
"""Consecutive failures that open the circuit."""

OPEN_S = 1.0
"""Time until a trial call: a restarted service is back within seconds."""

OPENED = Counter("forage_common_circuits_opened_total", "Circuits opened by failures in a row", ["service"])
OPEN = Gauge("forage_common_circuits_open", "Circuits that are open", ["service"])

_GRPC_UNAVAILABLE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
_HTTP_UNAVAILABLE = {502, 503, 504}


class CircuitOpenError(ForageError):
    """The attempt was not made; `retry_after_s` says when one may be."""

    def __init__(self, service: str, address: str, retry_after_s: float, reason: str) -> None:
        super().__init__(f"the {service} at {address} keeps failing: no calls for {retry_after_s:.1f} s; {reason}")
        self.retry_after_s = retry_after_s


def is_unavailable(error: BaseException) -> bool:
    """Whether an error means that nobody answers. A rejection is an answer, and so is a request to come back later."""
    if isinstance(error, grpc.RpcError):
        return error.code() in _GRPC_UNAVAILABLE
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _HTTP_UNAVAILABLE and "retry-after" not in error.response.headers
    # ssl: a service that refuses a certificate after the handshake, which httpx lets through
    return isinstance(error, httpx.TransportError | ssl.SSLError | TimeoutError)


class Circuit:
    """Guards the attempts to call one address; for use on one event loop.

    Closed until `failures` consecutive attempts have failed. Then open: attempts are refused for `open_s`, after which
    one trial at a time is allowed. If it succeeds the circuit closes; if it fails the pause starts again.
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
        self.address = redact_url(address)
        self._max_failures = failures
        self._open_s = open_s
        self._clock = clock
        self._failures = 0
        self._reason = ""
        self._trial_at: float | None = None
        self._is_trial_running = False
        for metric in (OPEN, OPENED):
            metric.labels(service)  # exported as 0 from the start

    @property
    def is_open(self) -> bool:
        """Whether attempts are refused, except for a trial."""
        return self._trial_at is not None

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Make an attempt inside the block; its result is recorded.

        Raises:
            CircuitOpenError: the circuit is open.
        """
        is_trial = self._enter()
        try:
            yield
        except Exception as error:
            if is_unavailable(error):
                self._reason = describe_error(error)
                self._record_failure(is_trial)
            else:
                self._close()
            raise
        else:
            self._close()
        finally:  # a cancelled trial says nothing about the address
            self._is_trial_running = self._is_trial_running and not is_trial

    def _enter(self) -> bool:
        if self._trial_at is None:
            return False
        wait_s = self._trial_at - self._clock()
        if self._is_trial_running or wait_s > 0:
            raise CircuitOpenError(self.service, self.address, max(0.0, wait_s), self._reason)
        self._is_trial_running = True
        return True

    def _record_failure(self, is_trial: bool) -> None:
        self._failures += 1
        if is_trial or (self._trial_at is None and self._failures >= self._max_failures):
            if self._trial_at is None:
                OPEN.labels(self.service).inc()
            self._trial_at = self._clock() + self._open_s
            OPENED.labels(self.service).inc()

    def _close(self) -> None:
        self._failures = 0
        if self._trial_at is not None:
            OPEN.labels(self.service).dec()
        self._trial_at = None
