"""What every request of an HTTP API passes first: the client's certificate and its token. And bodies with limits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from forage_runtime.security.refusals import Refusal, record_refusal
from forage_runtime.security.token_file import HEADER, TokenFile

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Refuse = Callable[[int, str, str, Mapping[str, str]], App]
"""Builds the answer to a refused request: status, sentence, kind of the error, headers."""

PROBES = frozenset({"/healthz", "/readyz", "/health"})
"""Paths that need neither: Kubernetes' probes have no certificate and no token."""
OBSERVED = frozenset({"/metrics", "/waitz"})
"""Paths that need a certificate where one is required, and no token: Prometheus and `forage status` read them."""
CLIENT_CERTIFICATE = "client_certificate"
"""Key in the state of an ASGI scope: name of the client's certificate, empty without one."""
NO_CERTIFICATE = "this service asks for a client certificate: send one that an authority of its tls.ca has signed"
NO_TOKEN = f"this service asks for a token: send '{HEADER}: Bearer …' with the right one"


def needs_token(path: str) -> bool:
    """Whether a path of a service with tokens needs one."""
    return path not in PROBES and path not in OBSERVED


class RequestGuard:
    """ASGI middleware that refuses callers before anything of the body is read.

    Args:
        wire: name in the count of refusals: retriever/http, …
        tokens: what callers must send; None: they need no token.
        needs_certificate: whether the server asks clients for certificates and requires them.
        protects: whether a path needs a token.
    """

    def __init__(
        self,
        app: App,
        wire: str,
        refuse: Refuse,
        tokens: TokenFile | None = None,
        needs_certificate: bool = False,
        protects: Callable[[str], bool] = needs_token,
    ) -> None:
        self._app = app
        self._wire = wire
        self._refuse = refuse
        self._tokens = tokens
        self._needs_certificate = needs_certificate
        self._protects = protects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._check(scope) if scope["type"] == "http" else None
        await (refused or self._app)(scope, receive, send)

    def _check(self, scope: Scope) -> App | None:
        path = scope["path"]
        if self._needs_certificate and lacks_certificate(scope):
            record_refusal(self._wire, Refusal.NO_CERTIFICATE, find_peer(scope))
            return self._refuse(403, NO_CERTIFICATE, "no_certificate", {})
        if self._tokens is not None and self._protects(path):
            given = next((value.decode("latin-1") for name, value in scope["headers"] if name == HEADER.encode()), "")
            if not self._tokens.accepts(given):
                reason = Refusal.WRONG_TOKEN if given else Refusal.NO_TOKEN
                record_refusal(self._wire, reason, find_peer(scope))
                return self._refuse(401, NO_TOKEN, "unauthenticated", {"WWW-Authenticate": "Bearer"})
        return None


def lacks_certificate(scope: Scope) -> bool:
    """Whether a request to a server that requires certificates lacks one that its path needs."""
    return scope["path"] not in PROBES and not scope.get("state", {}).get(CLIENT_CERTIFICATE)


def find_peer(scope: Scope) -> str:
    """The address that a request comes from."""
    client = scope.get("client")
    return client[0] if client else ""


class BodyError(Exception):
    """A body is not read to its end. status: of the answer, 413 (too large), 408 (too late), 400 (ended early)."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


async def read_body(receive: Receive, max_bytes: int, timeout_s: float, remedy: str = "send less") -> bytes:
    """Read a request's body.

    Raises:
        BodyError: it is larger than max_bytes, does not arrive within timeout_s, or the caller has gone.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise BodyError(400, "the connection was closed within the body")
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise BodyError(413, f"the body is larger than {max_bytes} bytes: {remedy}")
                if not message.get("more_body"):
                    return bytes(body)
    except TimeoutError:
        raise BodyError(408, f"the body did not arrive within {timeout_s:g} s: send it again") from None


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Let an application receive a body that has been read."""
    unread = [body]

    async def next_message() -> Any:
        return {"type": "http.request", "body": unread.pop(), "more_body": False} if unread else await receive()

    return next_message
