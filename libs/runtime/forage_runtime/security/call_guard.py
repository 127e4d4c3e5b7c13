"""What every gRPC server does with bytes that are no message, and with errors that nobody foresaw.

Without it gRPC answers both with UNKNOWN and the text of an exception, and writes a traceback that is no line of JSON.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from forage_runtime.telemetry.logs import get_logger

_MALFORMED = object()
"""Stands for a request whose bytes are no message of its call."""


class CallGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Answers bytes that are no message with INVALID_ARGUMENT, and unforeseen errors with INTERNAL and a line of log.

    It wraps the handlers of all services of a server, health and reflection too. It must be a server's last
    interceptor, so that the handler of a method is always the same.
    """

    def __init__(self) -> None:
        self._guarded: dict[str, Any] = {}

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        if (guarded := self._guarded.get(details.method)) is not None:
            return guarded
        handler = await continuation(details)
        if handler is None:  # no such method; not kept, for a caller may ask for any number of them
            return None
        return self._guarded.setdefault(details.method, _guard(handler, details.method))


def _guard(handler: Any, method: str) -> Any:
    inner = find_behaviour(handler)

    async def answer(request: Any, context: Any) -> Any:
        call = _Call(method, context)
        try:
            return await inner(await call.admit(request), context)
        except Exception as error:  # noqa: BLE001 - gRPC would send the text of the exception to the caller
            await call.fail(error)

    async def answer_stream(request: Any, context: Any) -> AsyncIterator[Any]:
        call = _Call(method, context)
        try:
            replies = inner(await call.admit(request), context)
            if hasattr(replies, "__aiter__"):
                async for reply in replies:
                    yield reply
            else:  # a handler that writes its replies itself
                await replies
        except Exception as error:  # noqa: BLE001 - as above
            await call.fail(error)

    return replace_behaviour(handler, answer, answer_stream, _parse_with(handler.request_deserializer))


def find_behaviour(handler: Any) -> Any:
    """The function that answers the calls of a method, of whichever of gRPC's four kinds."""
    return handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream


def replace_behaviour(handler: Any, answer: Any, answer_stream: Any, parse: Any) -> Any:
    """A handler of the same kind that answers by one of two functions, and reads requests by `parse`."""
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(answer_stream if handler.response_streaming else answer, parse, handler.response_serializer)


class _MalformedError(Exception):
    """Ends the requests of a stream."""


class _Call:
    def __init__(self, method: str, context: Any) -> None:
        self._method = method
        self._context = context
        self._is_malformed = False

    async def admit(self, request: Any) -> Any:
        if hasattr(request, "__aiter__"):
            return self._admit_each(request)
        if request is _MALFORMED:
            self._is_malformed = True
            raise _MalformedError
        return request

    async def fail(self, error: Exception) -> NoReturn:
        """End the call with the error that ended its handler."""
        # Not where the bytes are met: a stream may be read by another task than the one that writes its replies.
        if self._is_malformed:
            sentence = f"the bytes are not a message of {self._method}: build it from proto/forage/v1"
            await self._context.abort(grpc.StatusCode.INVALID_ARGUMENT, sentence)
        if isinstance(error, grpc.aio.AbortError):
            raise error
        get_logger().exception("call_failed", method=self._method, exc_info=error)
        await self._context.abort(grpc.StatusCode.INTERNAL, "the call failed; the service's log says why")
        raise AssertionError("unreachable: abort raises")

    async def _admit_each(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            if request is _MALFORMED:
                self._is_malformed = True
                raise _MalformedError
            yield request


def _parse_with(parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if parse is None:
        return None

    def parse_or_mark(content: bytes) -> Any:
        try:
            return parse(content)
        except DecodeError:
            return _MALFORMED

    return parse_or_mark
