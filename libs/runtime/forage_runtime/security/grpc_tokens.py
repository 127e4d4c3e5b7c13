"""Refuses gRPC callers without the right token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc

from forage_runtime.security.refusals import Refusal, record_refusal
from forage_runtime.security.token_file import HEADER, TokenFile

OPEN_SERVICE = "/grpc.health.v1.Health/"
"""Beginning of the methods that need no token: the kubelet's probes cannot send one."""


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets calls with a valid token pass, and health checks; all others, reflection too, are refused unread.

    Args:
        wire: service and protocol, for metrics and logs: reward/grpc.
    """

    def __init__(self, tokens: TokenFile, wire: str) -> None:
        self._tokens = tokens
        self._wire = wire

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        header = dict(details.invocation_metadata or ()).get(HEADER, "")
        if details.method.startswith(OPEN_SERVICE) or (isinstance(header, str) and self._tokens.accepts(header)):
            return await continuation(details)
        reason = Refusal.WRONG_TOKEN if header else Refusal.NO_TOKEN

        async def refuse(requests: Any, context: Any) -> NoReturn:
            record_refusal(self._wire, reason, context.peer())
            sentence = (
                f"this service asks for a token: send the metadata '{HEADER}: Bearer …' with the right one"
                f" ({'it does not know the one sent' if header else 'none was sent'})"
            )
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, sentence)
            raise AssertionError("unreachable: abort raises")

        # As if requests were streamed, whatever the method: then gRPC reads none of what the caller sends.
        return grpc.stream_stream_rpc_method_handler(refuse)


def make_interceptors(tokens: TokenFile | None, wire: str) -> tuple[grpc.aio.ServerInterceptor, ...]:
    """The interceptors of a server that asks for these tokens; none where there are none."""
    return () if tokens is None else (TokenInterceptor(tokens, wire),)
