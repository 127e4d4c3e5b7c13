"""Bounds the bytes of gRPC requests that a process holds: messages are read only while there is room for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
from prometheus_client import Counter

from forage_runtime.security.grpc_tokens import OPEN_SERVICE

SHED = Counter(
    "forage_common_requests_shed_total", "Requests turned away because others filled the room for them", ["wire"]
)
UNREAD = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**18))
"""Options of a server: it takes so many bytes of a request before it is read, not whatever the network carries."""

WAIT_S = 10.0
"""How long a request waits for room."""
_CHECKS = 2
READ_S = 30.0
"""How long a request may take to arrive, once there is room for it."""
CHECK_S = 2.0
"""The same of health checks, and how long they wait for room: they are a few bytes, and anybody may send them."""


class NoRoomError(Exception):
    """Other requests have filled the room for longer than `WAIT_S`."""


class RequestByteBudget:
    """So many bytes, which requests fill in the order of their arrival. For one event loop.

    Args:
        total: bytes of all requests together, as they are on the wire.
        largest: bytes of the largest request, which is reserved until a request has been read.
    """

    def __init__(self, total: int, largest: int) -> None:
        self.largest = largest
        self._total = total
        self._free = total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int, wait_s: float | None = WAIT_S) -> Reservation:
        """Take so many bytes, at most `largest`, until `shrink(0)` of what is returned.

        Args:
            wait_s: longest wait for them; None: as long as it takes.

        Raises:
            NoRoomError: there was no room within that time.
        """
        if self._waiting or size > self._free:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry = (size, turn)
            self._waiting.append(entry)
            try:
                async with asyncio.timeout(wait_s):
                    await turn  # wait: has a time limit, or the caller's deadline
            except BaseException as error:
                # Its turn may have come just before. From Python 3.12 on a time limit ends the wait all the same.
                has_room = turn.done() and not turn.cancelled()
                if not isinstance(error, TimeoutError):
                    if has_room:
                        self._give(size)
                    raise
                if not has_room:
                    used = (self._total - self._free) >> 20
                    limit = self._total >> 20
                    raise NoRoomError(
                        f"requests of {used} MiB are in progress, the limit is {limit} MiB: send it later"
                    ) from None
            finally:
                if entry in self._waiting:
                    self._waiting.remove(entry)
                self._admit()
        else:
            self._free -= size
        return Reservation(self, size)

    def _give(self, size: int) -> None:
        self._free += size
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            size, turn = self._waiting.popleft()
            if not turn.done():
                self._free -= size
                turn.set_result(None)


class Reservation:
    """Bytes that a request holds."""

    def __init__(self, budget: RequestByteBudget, size: int) -> None:
        self._budget = budget
        self._size = size

    def shrink(self, size: int) -> None:
        """Give back what is held beyond so many bytes."""
        if size < self._size:
            given, self._size = self._size - size, size
            self._budget._give(given)


class ByteBudgetInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Reads the request of a call when there is room for the largest one, and holds its size until it is answered.

    gRPC itself would read the requests of all calls at once. Streams of requests pass: their handlers hold messages.
    Health checks have a budget of their own, so that a service under load is not taken for one that is dead. The next
    interceptor must be `CallGuard`, or its like: replies of a stream come from an asynchronous generator.

    Args:
        wire: service and protocol, for the metric: reward/grpc.
    """

    def __init__(self, budget: RequestByteBudget, wire: str) -> None:
        self._budget = budget
        self._budget_of_checks = RequestByteBudget(_CHECKS * budget.largest, budget.largest)
        self._shed = SHED.labels(wire)
        self._wrapped: dict[str, Any] = {}

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        if (wrapped := self._wrapped.get(details.method)) is not None:
            return wrapped
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        return self._wrapped.setdefault(details.method, self._wrap(handler, details.method.startswith(OPEN_SERVICE)))

    def _wrap(self, handler: Any, is_check: bool) -> Any:
        parse = handler.request_deserializer

        async def answer(_: Any, context: Any) -> Any:
            async with self._admit(is_check, context) as reservation:
                request = parse(await _read(context, reservation, CHECK_S if is_check else READ_S))
                return await handler.unary_unary(request, context)

        async def answer_stream(_: Any, context: Any) -> AsyncIterator[Any]:
            async with self._admit(is_check, context) as reservation:
                request = parse(await _read(context, reservation, CHECK_S if is_check else READ_S))
                async for reply in handler.unary_stream(request, context):
                    yield reply

        # Declared as a stream of requests, so that it is these functions that read the only one.
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(answer_stream, None, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(answer, None, handler.response_serializer)

    @asynccontextmanager
    async def _admit(self, is_check: bool, context: Any) -> AsyncIterator[Reservation]:
        try:
            if is_check:
                reservation = await self._budget_of_checks.take(self._budget.largest, CHECK_S)
            else:
                reservation = await self._budget.take(self._budget.largest)
        except NoRoomError as error:
            self._shed.inc()
            await _refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        try:
            yield reservation
        finally:
            reservation.shrink(0)


async def _read(context: Any, reservation: Reservation, limit_s: float) -> Any:
    try:
        async with asyncio.timeout(limit_s):
            content = await context.read()  # not the iterator, whose frame would keep the bytes
    except TimeoutError:
        await _refuse(context, grpc.StatusCode.DEADLINE_EXCEEDED, f"the request did not arrive within {limit_s:g} s")
    if content is grpc.aio.EOF:
        await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "the call has no request: send one message")
    reservation.shrink(len(content))
    return content


async def _refuse(context: Any, code: grpc.StatusCode, sentence: str) -> NoReturn:
    await context.abort(code, sentence)
    raise AssertionError("unreachable: abort raises")
