"""What every request passes first: certificate, host, origin, size, token. It also adds the headers of every answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

import anyio
from prometheus_client import Counter, Gauge
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forage_console.security.access import WIRE, Access, TooManyTriesError
from forage_console.security.addresses import is_loopback
from forage_console.security.headers import add_headers
from forage_runtime.security.http.guard import NO_CERTIFICATE, OBSERVED, find_peer, lacks_certificate
from forage_runtime.security.refusals import Refusal, record_refusal
from forage_runtime.settings import Settings
from forage_runtime.telemetry.logs import get_logger

COOKIE = "forage_console"
LOGIN = "/login"
PROBES = frozenset({"/healthz", "/readyz", "/waitz", "/metrics"})
MAX_BODY_BYTES = 256 * 2**10
MAX_URL_BYTES = 16 * 2**10
BODY_TIMEOUT_S = 10.0
"""A body that has not arrived by then keeps a place from others; nobody needs a token to begin one at the login."""
MAX_REQUESTS = 512
"""Requests in progress. Probes are answered beyond: a busy console is not one that is dead."""
MAX_STREAMS = 64
"""Streams of events that are open at the same time; each browser tab has one or two."""
_READS = frozenset({"GET", "HEAD", "OPTIONS"})
REFUSED = Counter("forage_console_refused_total", "Requests that the guard refused", ["reason"])
for _reason in ("size", "path", "host", "origin", "certificate", "token", "tries", "streams", "busy", "slow"):
    REFUSED.labels(_reason)  # so that a scrape shows 0 before the first event
ANSWERED = Counter("forage_console_requests_total", "Requests by the status of the answer", ["status"])
STREAMS = Gauge("forage_console_streams", "Streams of events that are open")


class GuardError(HTTPException):  # type: ignore[misc]
    """A request that goes no further; the sentence is for its user."""

    def __init__(self, status: int, reason: str, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, detail, headers)
        self.reason = reason


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, settings: Settings, access: Access) -> None:
        self._app = app
        self._access = access
        self._needs_certificate = settings.tls.require_client_cert
        own = settings.console
        self._streams = 0
        self._requests = 0
        host = own.http_address.rpartition(":")[0]
        self._hosts = frozenset(name.lower() for name in ("localhost", "127.0.0.1", "[::1]", host, *own.hosts))
        # Elsewhere the token protects against pages that rebind a name of theirs to this address: they have no cookie.
        self._checks_host = is_loopback(own.http_address) or bool(own.hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        answer = _Answer(send, request.url.scheme == "https" and is_pinned_name(request.headers.get("host", "")))
        try:
            self._check(request)
            with self._count_request(request.url.path), self._count_stream(request):
                await self._app(scope, _limit_body(receive), answer.send)
        except GuardError as refused:
            REFUSED.labels(refused.reason).inc()
            await answer.replace(_reply(request, refused), scope, receive)
        except Exception as error:  # noqa: BLE001 - the log has it, and the browser a sentence
            if answer.is_started and _is_hang_up(error):
                return
            get_logger().exception("request_failed", method=request.method, path=request.url.path[:500])
            detail = "the console failed to answer: its log says why"
            await answer.replace(JSONResponse({"detail": detail}, 500), scope, receive)

    @contextmanager
    def _count_request(self, path: str) -> Iterator[None]:
        """Count a request that is no probe while it is answered."""
        counts = path not in PROBES
        if counts and self._requests >= MAX_REQUESTS:
            raise GuardError(503, "busy", f"{MAX_REQUESTS} requests are in progress", {"Retry-After": "10"})
        self._requests += counts
        try:
            yield
        finally:
            self._requests -= counts

    @contextmanager
    def _count_stream(self, request: Request) -> Iterator[None]:
        """Count a request for a stream of events while it is answered."""
        path = request.url.path
        is_stream = path.endswith("/events") or (request.method == "POST" and path.endswith("/ask"))
        if is_stream and self._streams >= MAX_STREAMS:
            detail = f"{MAX_STREAMS} pages follow runs already: close some of them"
            raise GuardError(503, "streams", detail, {"Retry-After": "10"})
        self._streams += is_stream
        STREAMS.set(self._streams)
        try:
            yield
        finally:
            self._streams -= is_stream
            STREAMS.set(self._streams)

    def _check(self, request: Request) -> None:
        """
        Raises:
            GuardError: the request may not pass.
        """
        path = request.url.path
        if len(request.scope.get("raw_path") or b"") + len(request.scope["query_string"]) > MAX_URL_BYTES:
            raise GuardError(414, "size", f"the address is longer than {MAX_URL_BYTES} bytes: send a shorter filter")
        if "\0" in path:
            raise GuardError(404, "path", "there is no such page")
        # A browser has no certificate: where there is a token, it is what people sign in with.
        is_for_machines = path in OBSERVED or self._access.is_open
        if self._needs_certificate and is_for_machines and lacks_certificate(request.scope):
            record_refusal(WIRE, Refusal.NO_CERTIFICATE, find_peer(request.scope))
            raise GuardError(403, "certificate", NO_CERTIFICATE)
        if path in PROBES:
            return
        headers = request.headers
        self._check_host(headers)
        if request.method not in _READS:
            self._check_origin(headers)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            raise GuardError(413, "size", f"the body is larger than {MAX_BODY_BYTES} bytes: send less")
        if path != LOGIN and not self._access.is_open:
            self._check_access(request)

    def _check_host(self, headers: Headers) -> None:
        """Refuse names of others that lead to this machine: their pages could read every answer."""
        if self._checks_host and _split_host(headers.get("host", "")) not in self._hosts:
            known = ", ".join(sorted(self._hosts))
            raise GuardError(
                403, "host", f"the console is not reached under this name, only under {known}: see console.hosts"
            )

    def _check_origin(self, headers: Headers) -> None:
        """Refuse what the page of another site sends."""
        origin = headers.get("origin")
        if origin is None:
            is_own = headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        else:
            place = origin.partition("://")[2].lower()  # no path follows the host in an Origin
            is_own = place != "" and (place == headers.get("host", "").lower() or _split_host(place) in self._hosts)
        if not is_own:
            raise GuardError(403, "origin", "this was sent by the page of another site: use the console's own pages")

    def _check_access(self, request: Request) -> None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        try:
            if scheme.lower() == "bearer" and self._access.admits_token(token.strip(), find_peer(request.scope)):
                return
        except TooManyTriesError as error:
            raise GuardError(429, "tries", str(error), {"Retry-After": f"{error.wait_s:.0f}"}) from None
        if not self._access.admits_session(request.cookies.get(COOKIE, "")):
            if not token:  # a wrong one was counted where it was compared
                record_refusal(WIRE, Refusal.NO_TOKEN, find_peer(request.scope))
            detail = "this console needs its token: sign in at /login, or send it as 'Authorization: Bearer TOKEN'"
            raise GuardError(401, "token", detail, {"WWW-Authenticate": "Bearer"})


def is_pinned_name(host: str) -> bool:
    """Whether browsers should reach a host by TLS alone; not localhost, whose other ports have other programs."""
    return not is_loopback(f"{_split_host(host)}:0")


def _split_host(value: str) -> str:
    """The name in a Host header, without its port."""
    name, _, port = value.lower().rpartition(":")
    return name if name and port.isdecimal() else value.lower()


def _reply(request: Request, refused: GuardError) -> Response:
    """The answer to a refused request; a browser that opens a page without a session is sent to the login."""
    is_page = not request.url.path.startswith("/api/") and "text/html" in request.headers.get("accept", "")
    if refused.status_code == 401 and is_page and request.method in _READS:
        wanted = quote(f"{request.url.path}?{request.url.query}".rstrip("?"), safe="")
        return RedirectResponse(f"{LOGIN}?next={wanted}", 303)
    return JSONResponse({"detail": refused.detail}, refused.status_code, refused.headers)


class _Answer:
    """What is sent back: with the headers of every answer, and counted."""

    def __init__(self, send: Send, is_pinned: bool) -> None:
        self._send = send
        self._is_pinned = is_pinned
        self.is_started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.is_started = True
            add_headers(MutableHeaders(scope=message), self._is_pinned)
            ANSWERED.labels(str(message["status"])).inc()
        await self._send(message)

    async def replace(self, response: Response, scope: Scope, receive: Receive) -> None:
        """Send another answer, unless one has begun: that one ends where it is."""
        if not self.is_started:
            await response(scope, receive, self.send)


def _is_hang_up(error: BaseException) -> bool:
    """Whether nothing failed but that the browser closed a stream of events: FastAPI may still be writing to it."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_hang_up, error.exceptions))
    return isinstance(error, anyio.BrokenResourceError | anyio.ClosedResourceError)


def _limit_body(receive: Receive) -> Receive:
    """Receive a body whose length was not announced up to the limit, and within the time for it."""
    received = 0
    has_more = True
    clock = asyncio.get_running_loop().time
    deadline = clock() + BODY_TIMEOUT_S

    async def limited() -> Message:
        nonlocal received, has_more
        if not has_more:  # waits for the caller to leave
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise GuardError(408, "slow", f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
        received += len(message.get("body", b""))
        if received > MAX_BODY_BYTES:
            raise GuardError(413, "size", f"the body is larger than {MAX_BODY_BYTES} bytes: send less")
        has_more = message.get("more_body", False)
        return message

    return limited
