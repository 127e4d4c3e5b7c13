"""TLS of uvicorn's servers: handshakes with a time limit, counted refusals, and the client's certificate."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

from forage_runtime.security.handshakes import HANDSHAKE_S, LINGER_S, PLAIN_TEXT_REPLY, is_plain_http, name_certificate
from forage_runtime.security.http.guard import CLIENT_CERTIFICATE
from forage_runtime.security.http.limits import BoundedProtocol, QuietConnections
from forage_runtime.security.refusals import Refusal, record_refusal
from forage_runtime.security.tls import make_server_context
from forage_runtime.settings import TlsSettings

_READ_BYTES = 2**16
_alerts: ContextVar[list[bytes]] = ContextVar("alerts")
"""What TLS has to say at the failure of the handshake that the current task does."""


def make_protocol(tls: TlsSettings, wire: str) -> Callable[..., asyncio.Protocol]:
    """Make what `uvicorn.Config` takes as `http`: its own protocol with limits, within TLS where every wire speaks it.

    The name of the client's certificate is in the state of each request's scope, as `client_certificate`.

    Args:
        wire: name in the count of refusals: retriever/http, …

    Raises:
        SettingsError: a file is wrong.
    """
    reloading, quiet = make_server_context(tls), QuietConnections()
    if reloading is None:
        return partial(BoundedProtocol, quiet)
    context = _Context(reloading)

    def make(app_state: dict[str, Any], **options: Any) -> asyncio.Protocol:
        def make_inner(certificate: str) -> asyncio.Protocol:
            state = {**app_state, CLIENT_CERTIFICATE: certificate}
            return BoundedProtocol(quiet, app_state=state, **options)

        return _Handshake(context, wire, quiet, make_inner)

    return make


class _Handshake(asyncio.Protocol):
    """A connection until its handshake has ended; then uvicorn's protocol takes over.

    asyncio would do the handshake by itself, but tells nobody who failed at it, nor why.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        wire: str,
        quiet: QuietConnections,
        make_inner: Callable[[str], asyncio.Protocol],
    ) -> None:
        self._context = context
        self._wire = wire
        self._quiet = quiet
        self._make_inner = make_inner
        self._early: list[bytes] = []  # a client may send its request with the end of its handshake
        self._is_at_end = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()  # nothing is read before TLS reads it
        self._quiet.add(self, transport)
        self._task = asyncio.get_running_loop().create_task(self._shake_hands(transport))

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def eof_received(self) -> None:
        self._is_at_end = True

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        peer = (transport.get_extra_info("peername") or ("",))[0]
        alerts: list[bytes] = []
        _alerts.set(alerts)
        with transport.get_extra_info("socket").dup() as plain:  # asyncio closes its own when the handshake fails
            try:
                secure = await loop.start_tls(
                    transport, self, self._context, server_side=True, ssl_handshake_timeout=HANDSHAKE_S
                )
            except ssl.SSLError as error:
                record_refusal(self._wire, Refusal.TLS_FAILED, peer, str(error.reason))
                await _end(plain, PLAIN_TEXT_REPLY if is_plain_http(error) else b"".join(alerts))
                return
            except ConnectionAbortedError:  # asyncio's word for its time limit
                record_refusal(self._wire, Refusal.TLS_FAILED, peer, f"no handshake within {HANDSHAKE_S:g} s")
                return
            except OSError:  # a check of the port without a byte, as load balancers do
                return
            finally:
                self._quiet.remove(self)
        if secure is None or secure.is_closing():
            return
        inner = self._make_inner(name_certificate(secure.get_extra_info("peercert")))
        secure.set_protocol(inner)
        inner.connection_made(secure)
        if self._early:
            inner.data_received(b"".join(self._early))
        if self._is_at_end:
            inner.eof_received()


class _Context(ssl.SSLContext):
    """The context of a server's connections, which says why a handshake failed: asyncio drops what TLS answers."""

    def __new__(cls, _: ssl.SSLContext) -> _Context:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__()
        self._context = context

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **options: Any) -> ssl.SSLObject:
        secure, alerts = self._context.wrap_bio(incoming, outgoing, *args, **options), _alerts.get()
        shake_hands = secure.do_handshake

        def do_handshake() -> None:
            try:
                shake_hands()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError:
                alerts.append(outgoing.read())
                raise

        secure.do_handshake = do_handshake  # type: ignore[method-assign]
        return secure


async def _end(plain: socket.socket, last: bytes) -> None:
    """Send what is to be read last: a connection that is closed with something unread is reset, and loses it."""
    plain.setblocking(False)
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError, TimeoutError):
        plain.send(last)
        plain.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(LINGER_S):
            while await loop.sock_recv(plain, _READ_BYTES):
                pass
