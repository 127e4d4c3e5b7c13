"""Calls to other services: one deadline for all attempts, back-off with jitter, a circuit breaker, and metrics."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
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
    wait_random_exponential,
)

from forage_runtime.clients.circuit import Circuit, CircuitOpenError
from forage_runtime.clients.concurrency import Slots
from forage_runtime.clients.reasons import describe_error
from forage_runtime.errors import ForageError, SettingsError, UnavailableError
from forage_runtime.security.handshakes import explain_tls, record_failure
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.waits import Wait, waiting

T = TypeVar("T")
RETRIED = Counter("forage_common_call_retries_total", "Attempts that failed and were repeated", ["service"])
GIVEN_UP = Counter("forage_common_calls_given_up_total", "Calls that failed for good", ["service"])

_GRPC_TRANSIENT = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
}
_HTTP_TRANSIENT = {429, 500, 502, 503, 504}
_jitter = wait_random_exponential(multiplier=0.1, max=2.0)


class RefusedError(ForageError):
    """A service rejected the request; repeating it does not help."""


class MalformedReplyError(ForageError):
    """A service's reply does not follow its contract."""


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed later."""
    if isinstance(error, grpc.RpcError):
        return error.code() in _GRPC_TRANSIENT
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _HTTP_TRANSIENT
    return isinstance(error, httpx.TransportError | ssl.SSLError | TimeoutError | CircuitOpenError)


def check_token(error: grpc.RpcError, setting: str) -> None:
    """Tell the operator which file a service reads that refuses the token of a call.

    Raises:
        SettingsError: that is why the call failed.
    """
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        raise SettingsError(f"{error.details()}: set {setting} to the file that the service reads") from error


async def call(
    circuit: Circuit, attempt: Callable[[float], Awaitable[T]], timeout_s: float, slots: Slots | None = None
) -> T:
    """Await `attempt` until it succeeds, fails permanently, or `timeout_s` has passed for all attempts together.

    While the circuit is open the call makes no attempt: it waits for the circuit to close, or fails at once if the
    deadline comes first.

    Args:
        attempt: gets the seconds that are left.
        slots: each attempt waits for one, and that time does not count.

    Raises:
        UnavailableError: transient failures until the deadline.
        Exception: a permanent failure of `attempt`.
    """
    retried, given_up = _counters(circuit.service)
    explained = ""  # of TLS: the last attempt may have ended by the deadline, or met the open circuit

    def record(state: RetryCallState) -> None:
        nonlocal explained
        explained = _record_retry(circuit, retried, state) or explained

    try:
        with waiting("answers", on=circuit.service, limit_s=timeout_s, detail=circuit.address) as wait:
            return await _repeat(circuit, attempt, timeout_s, slots, wait, record)
    except RetryError as error:
        given_up.inc()
        cause = error.last_attempt.exception()
        reason = explain_tls(cause) or explained or ("" if cause is None else describe_error(cause))
        raise UnavailableError(
            f"the {circuit.service} at {circuit.address} gave no answer within {timeout_s:g} s ({reason})"
        ) from cause


async def _repeat(
    circuit: Circuit,
    attempt: Callable[[float], Awaitable[T]],
    timeout_s: float,
    slots: Slots | None,
    wait: Wait,
    record: Callable[[RetryCallState], None],
) -> T:
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout_s
    async for trial in AsyncRetrying(
        stop=lambda state: clock() + state.upcoming_sleep >= deadline,  # noqa: B023 - that of now
        wait=_next_delay,
        retry=retry_if_exception(is_transient),
        before_sleep=record,
    ):
        with trial:
            asked = clock()
            async with slots.take(wait) if slots is not None else nullcontext():
                queued_s = clock() - asked
                deadline += queued_s
                wait.renewed += queued_s
                with circuit.attempt():
                    async with asyncio.timeout_at(deadline):
                        return await attempt(deadline - clock())
    raise AssertionError("unreachable: tenacity returns or raises")


@cache
def _counters(service: str) -> tuple[Counter, Counter]:
    """The retries and the failures of a service; both are exported from its first call on, as 0."""
    return RETRIED.labels(service), GIVEN_UP.labels(service)


def _record_retry(circuit: Circuit, retried: Counter, state: RetryCallState) -> str:
    """Count it; returns a sentence if TLS failed."""
    retried.inc()
    error = state.outcome.exception() if state.outcome else None
    tracing.current_span().add_event("retry", {"forage.attempt": state.attempt_number, "forage.error": repr(error)})
    return record_failure(circuit.service, circuit.address, error)


def _next_delay(state: RetryCallState) -> float:
    """Seconds before the next attempt: the delay that the service or the circuit asks for, plus jitter."""
    error = state.outcome.exception() if state.outcome else None
    return _requested_delay(error) + _jitter(state)


def _requested_delay(error: BaseException | None) -> float:
    if isinstance(error, CircuitOpenError):
        return error.retry_after_s
    if isinstance(error, httpx.HTTPStatusError):
        seconds = error.response.headers.get("retry-after", "")
        return float(seconds) if seconds.isdecimal() else 0.0
    return 0.0
