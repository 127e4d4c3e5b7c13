"""HTTP calls that leave a service: to the configured host only, and replies of bounded size and time.

A reply is never followed to another address, never decompressed (a megabyte could become gigabytes), and the
environment adds neither proxies nor credentials. Connections have an age, so that a server that joins gets its share.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import httpx

from forage_runtime.clients.calls import MalformedReplyError

MAX_REPLY_BYTES = 256 * 2**20
"""Of the largest replies that services give: as many as a message of gRPC may have."""
AGE_S = (60.0, 120.0)
"""Between these, by chance, a connection ends after a reply; the next request may reach a server that joined since."""
_LIMITS = httpx.Limits()
"""As many as there are calls: who makes them bounds them, where a wait is not taken for that of a slow server."""

_T = TypeVar("_T")


class UnboundedReplyError(MalformedReplyError):
    """A reply is larger than it may be, or compressed, which hides its size."""


def bound_replies(
    max_bytes: int = MAX_REPLY_BYTES,
    headers: Mapping[str, str] | None = None,
    verify: ssl.SSLContext | bool = True,
    limits: httpx.Limits = _LIMITS,
) -> dict[str, Any]:
    """Options of an `httpx.AsyncClient` whose replies raise `UnboundedReplyError` beyond `max_bytes`.

    Args:
        headers: more headers of every request.
        verify, limits: as httpx takes them, which reads them here only.
    """
    return _make_options(max_bytes, headers, _bind_async) | {"transport": _AgingTransport(verify, limits)}


def bound_blocking_replies(max_bytes: int) -> dict[str, Any]:
    """The same for an `httpx.Client`."""
    return _make_options(max_bytes, None, _check)


@dataclass(frozen=True)
class Reply:
    """A whole reply."""

    status: int
    headers: httpx.Headers
    content: bytes


class BlockingClient:
    """Calls of threads, each within its time: httpx's own blocking client limits the pause between two bytes only.

    Thread-safe. The calls run on an event loop in a thread of their own, which begins with the first one.
    """

    def __init__(self, base_url: str, max_bytes: int, headers: Mapping[str, str] | None = None) -> None:
        self._base_url = base_url.rstrip("/") + "/"
        self._options = bound_replies(max_bytes, headers)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: httpx.AsyncClient | None = None

    def request(self, method: str, path: str, body: Any, timeout_s: float, connect_s: float | None = None) -> Reply:
        """Send a request with a JSON body, or none, and read the whole reply.

        Raises:
            httpx.TransportError: the host cannot be reached, or breaks off.
            TimeoutError: the reply was not complete within `timeout_s`.
            UnboundedReplyError: the reply is too large.
        """
        return self._run(self._request(method, path, body, timeout_s, connect_s))

    async def _request(self, method: str, path: str, body: Any, timeout_s: float, connect_s: float | None) -> Reply:
        if self._client is None:
            self._client = httpx.AsyncClient(base_url=self._base_url, **self._options)
        async with asyncio.timeout(timeout_s):
            limits = httpx.Timeout(None, connect=connect_s)
            response = await self._client.request(method, path.lstrip("/"), json=body, timeout=limits)
        return Reply(response.status_code, response.headers, response.content)

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="outgoing", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class _AgingTransport(httpx.AsyncHTTPTransport):
    """httpx's own, whose connections end between two requests once they are as old as `AGE_S` says."""

    def __init__(self, verify: ssl.SSLContext | bool, limits: httpx.Limits) -> None:
        super().__init__(verify=verify, limits=limits, trust_env=False)
        connect = self._pool.create_connection

        def connect_for_a_time(origin: Any) -> Any:
            connection: Any = connect(origin)
            is_idle_too_long, end = connection.has_expired, time.monotonic() + random.uniform(*AGE_S)
            connection.has_expired = lambda: is_idle_too_long() or (connection.is_idle() and time.monotonic() >= end)
            return connection

        self._pool.create_connection = connect_for_a_time  # type: ignore[method-assign]


def _make_options(max_bytes: int, headers: Mapping[str, str] | None, check: Any) -> dict[str, Any]:
    return {
        "headers": {**(headers or {}), "accept-encoding": "identity"},
        "follow_redirects": False,
        "trust_env": False,
        "event_hooks": {"response": [partial(check, max_bytes)]},
    }


async def _bind_async(max_bytes: int, response: httpx.Response) -> None:
    _check(max_bytes, response)


def _check(max_bytes: int, response: httpx.Response) -> None:
    url = f"{response.url.scheme}://{response.url.netloc.decode('ascii', 'replace')}"
    if (encoding := response.headers.get("content-encoding", "identity").lower()) != "identity":
        raise UnboundedReplyError(f"the reply of {url} is compressed ({encoding[:40]!r}), which was not asked for")
    length = response.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 18 or int(length) > max_bytes):
        raise _make_error(url, max_bytes)
    response.stream = _Bounded(response.stream, max_bytes, url)


class _Bounded(httpx.AsyncByteStream, httpx.SyncByteStream):
    """The body of a reply, which ends with an error beyond its bound."""

    def __init__(self, stream: Any, max_bytes: int, url: str) -> None:
        self._stream = stream
        self._left = max_bytes
        self._error = _make_error(url, max_bytes)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            yield self._count(part)

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            yield self._count(part)

    async def aclose(self) -> None:
        await self._stream.aclose()

    def close(self) -> None:
        self._stream.close()

    def _count(self, part: bytes) -> bytes:
        self._left -= len(part)
        if self._left < 0:
            raise self._error
        return part


def _make_error(url: str, max_bytes: int) -> UnboundedReplyError:
    return UnboundedReplyError(f"the reply of {url} is larger than {max_bytes} bytes")
