"""Calls to other services: a deadline over all attempts, back-off with jitter, a circuit breaker, and a count of what
failed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache
from typing import TypeVar

import grpc
import httpx
from prometheus_client import Counter
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    RetryError,
    retry_if_exception,
    stop_before_delay,
    wait_random_exponential,
)

from forage_common.clients.circuit import Circuit, CircuitOpenError
from forage_common.errors import ForageError, UnavailableError
from forage_common.telemetry import tracing

T = TypeVar("T")
RETRIED = Counter("forage_common_call_retries_total", "Attempts that failed and were repeated", ["service"])
GIVEN_UP = Counter("forage_common_calls_given_up_total", "Calls that failed for good", ["service"])

GRPC_RECONNECT = (("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 1000))
"""Options of a channel: by default it waits up to two minutes between its own attempts, and fails calls meanwhile."""

GRPC_ROUND_ROBIN = (("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),)
"""Options of a channel: by default all calls go to the first address of a name, here to each in turn."""

_GRPC_TRANSIENT = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
}
_HTTP_TRANSIENT = {429, 500, 502, 503, 504}
_jitter = wait_random_exponential(multiplier=0.1, max=2.0)


class RefusedError(ForageError):
    """A service answered that it will not serve this request, whenever it comes."""


class MalformedReplyError(ForageError):
    """A service answered, but not what its contract says."""


def is_transient(error: BaseException) -> bool:
    """Whether the same call may go through later."""
    if isinstance(error, grpc.RpcError):
        return error.code() in _GRPC_TRANSIENT
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _HTTP_TRANSIENT
    return isinstance(error, httpx.TransportError | TimeoutError | CircuitOpenError)


async def call(circuit: Circuit, attempt: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    """Await `attempt()` until it succeeds, fails for good, or `timeout_s` has passed over all attempts.

    While the circuit is open the call waits for its end without an attempt, or gives up at once where the deadline
    comes first.

    Raises:
        UnavailableError: transient failures until the deadline.
        Exception: whatever `attempt` raised that is not transient.
    """
    retried, given_up = _counters(circuit.service)
    deadline = asyncio.get_running_loop().time() + timeout_s
    try:
        async for trial in AsyncRetrying(
            stop=stop_before_delay(timeout_s),
            wait=_pause,
            retry=retry_if_exception(is_transient),
            before_sleep=lambda state: _record_retry(retried, state),
        ):
            with trial, circuit.attempt():
                async with asyncio.timeout_at(deadline):
                    return await attempt()
    except RetryError as error:
        given_up.inc()
        cause = error.last_attempt.exception()
        reason = str(cause) or type(cause).__name__
        raise UnavailableError(
            f"the {circuit.service} at {circuit.address} gave no answer within {timeout_s:g} s ({reason})"
        ) from cause
    raise AssertionError("unreachable: tenacity returns or raises")


@cache
def _counters(service: str) -> tuple[Counter, Counter]:
    """The retries and the failures of a service; both are exported from its first call on, as 0."""
    return RETRIED.labels(service), GIVEN_UP.labels(service)


def _record_retry(retried: Counter, state: RetryCallState) -> None:
    retried.inc()
    error = state.outcome.exception() if state.outcome else None
    tracing.current_span().add_event("retry", {"forage.attempt": state.attempt_number, "forage.error": repr(error)})


def _pause(state: RetryCallState) -> float:
    """Seconds before the next attempt: what the service or the circuit asks for, and jitter."""
    error = state.outcome.exception() if state.outcome else None
    return _asked_for(error) + _jitter(state)


def _asked_for(error: BaseException | None) -> float:
    if isinstance(error, CircuitOpenError):
        return error.retry_after_s
    if isinstance(error, httpx.HTTPStatusError):
        seconds = error.response.headers.get("retry-after", "")
        return float(seconds) if seconds.isdecimal() else 0.0
    return 0.0
