"""Bounds the calls and connections of a gRPC server, so that strangers take no room from callers with a token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from forage_runtime.addresses import bound_by_descriptors
from forage_runtime.security.byte_budget import SHED, UNREAD, ByteBudgetInterceptor, RequestByteBudget
from forage_runtime.security.call_guard import find_behaviour, replace_behaviour
from forage_runtime.security.grpc_tokens import OPEN_SERVICE, make_interceptors
from forage_runtime.security.token_file import TokenFile

MAX_WATCHERS = 32
"""Calls of health's `Watch` at a time, which last as long as their callers like and need no token."""
MAX_CHECKS = 64
"""Other calls of health at a time."""
HANDSHAKE_MS = 10_000
"""Time for TLS and the first frames of HTTP/2; gRPC itself gives two minutes."""
IDLE_MS = 300_000
"""How long a connection without calls stays; clients connect again with their next call."""
AGE_MS = 90_000
"""Age at which clients connect again, give or take a tenth, once their calls have ended: so they find new servers."""
MAX_CONNECTIONS = 65_536
"""Of a server, where the process may open so many files; further ones are closed at once."""
PING_MS, PING_REPLY_MS = 60_000, 20_000
"""How often a server asks whether the other end of a call is there, and how long it waits for the reply."""

_WATCH = OPEN_SERVICE + "Watch"


def limit_connections() -> list[tuple[str, int]]:
    """Options of a server: handshakes, connections that are old or without calls, and callers that are gone end."""
    return [
        ("grpc.max_connection_age_ms", AGE_MS),
        # Else idle ones would take the descriptors of HTTP and of files.
        ("grpc.max_allowed_incoming_connections", bound_by_descriptors(MAX_CONNECTIONS, 4)),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.keepalive_time_ms", PING_MS),
        ("grpc.keepalive_timeout_ms", PING_REPLY_MS),
        ("grpc.http2.ping_timeout_ms", PING_REPLY_MS),  # the one that this version of gRPC obeys
        ("grpc.http2.max_pings_without_data", 0),  # any number: else it asks twice, and never again
        *UNREAD,
    ]


def guard_calls(
    tokens: TokenFile | None, budget: RequestByteBudget, wire: str, most: int | None = None
) -> tuple[grpc.aio.ServerInterceptor, ...]:
    """The interceptors of a server, in their order; a `CallGuard` comes after them.

    Args:
        wire: service and protocol, for metrics and logs: reward/grpc.
        most: calls at a time, health checks and refused callers not counted; None: any number.
    """
    # Calls are counted behind the token: a limit of gRPC's own would count strangers too.
    return (*make_interceptors(tokens, wire), CallLimits(wire, most), ByteBudgetInterceptor(budget, wire))


class _Calls:
    """Calls of one kind that are in progress. For one event loop."""

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self._count = 0

    def describe_excess(self) -> str | None:
        """Why there is no room for one more; None if there is."""
        return f"{self._count} {self._what} are in progress: try later" if self._count >= self._most else None

    @contextmanager
    def enter(self) -> Iterator[None]:
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


class CallLimits(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls beyond so many at a time with RESOURCE_EXHAUSTED, unread, those of health apart from all others.

    The next interceptor must be `ByteBudgetInterceptor` or `CallGuard`: replies of a stream come from an asynchronous
    generator.

    Args:
        wire: service and protocol, for the metric: reward/grpc.
        most: calls at a time; None: any number.
    """

    def __init__(self, wire: str, most: int | None) -> None:
        self._calls = None if most is None else _Calls(most, "calls, as many as this service takes,")
        self._watchers = _Calls(MAX_WATCHERS, "watchers of its health, as many as this service takes,")
        self._checks = _Calls(MAX_CHECKS, "health checks, as many as this service takes,")
        self._shed = SHED.labels(wire)
        self._wrapped: dict[str, Any] = {}

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        if (wrapped := self._wrapped.get(details.method)) is not None:
            return wrapped
        handler = await continuation(details)
        calls = self._find(details.method)
        if handler is None or calls is None:
            return handler
        return self._wrapped.setdefault(details.method, self._wrap(handler, calls))

    def _find(self, method: str) -> _Calls | None:
        if not method.startswith(OPEN_SERVICE):
            return self._calls
        return self._watchers if method == _WATCH else self._checks

    def _wrap(self, handler: Any, calls: _Calls) -> Any:
        inner = find_behaviour(handler)

        async def answer(request: Any, context: Any) -> Any:
            if excess := calls.describe_excess():
                await self._refuse(context, excess)
            with calls.enter():
                return await inner(request, context)

        async def answer_stream(request: Any, context: Any) -> AsyncIterator[Any]:
            if excess := calls.describe_excess():
                await self._refuse(context, excess)
            with calls.enter():
                async for reply in inner(request, context):
                    yield reply

        return replace_behaviour(handler, answer, answer_stream, handler.request_deserializer)

    async def _refuse(self, context: Any, sentence: str) -> None:
        self._shed.inc()
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence)
