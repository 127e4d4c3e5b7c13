"""Calls to other services: a deadline over all attempts, back-off with jitter, and a count of what failed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
import httpx
from prometheus_client import Counter
from tenacity import AsyncRetrying, RetryError, retry_if_exception, stop_after_delay, wait_random_exponential

from forage_common.errors import UnavailableError

T = TypeVar("T")
RETRIED = Counter("forage_common_call_retries_total", "Attempts that failed and were repeated", ["service"])
GIVEN_UP = Counter("forage_common_calls_given_up_total", "Calls that failed for good", ["service"])

_GRPC_TRANSIENT = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
}
_HTTP_TRANSIENT = {500, 502, 503, 504}


def is_transient(error: BaseException) -> bool:
    """Whether the same call may go through later."""
    if isinstance(error, grpc.RpcError):
        return error.code() in _GRPC_TRANSIENT
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _HTTP_TRANSIENT
    return isinstance(error, httpx.TransportError)


async def call(service: str, attempt: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    """Await `attempt()` until it succeeds, fails for good, or `timeout_s` has passed over all attempts.

    Raises:
        UnavailableError: transient failures until the deadline.
        Exception: whatever `attempt` raised that is not transient.
    """
    try:
        async for trial in AsyncRetrying(
            stop=stop_after_delay(timeout_s),
            wait=wait_random_exponential(multiplier=0.1, max=2.0),
            retry=retry_if_exception(is_transient),
            before_sleep=lambda _: RETRIED.labels(service).inc(),
        ):
            with trial:
                return await attempt()
    except RetryError as error:
        GIVEN_UP.labels(service).inc()
        cause = error.last_attempt.exception()
        raise UnavailableError(f"the {service} gave no answer within {timeout_s:.0f} s ({cause})") from cause
    raise AssertionError("unreachable: tenacity returns or raises")
