"""TLS and client certificates of the health server of every service."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

from forage_runtime.security.handshakes import HANDSHAKE_S, LINGER_S, PLAIN_TEXT_REPLY, name_certificate
from forage_runtime.security.http.guard import NO_CERTIFICATE, PROBES
from forage_runtime.security.refusals import Refusal, record_refusal
from forage_runtime.security.tls import make_server_context
from forage_runtime.settings import TlsSettings

_READ_BYTES = 2**16
_TLS_HANDSHAKE = b"\x16"
"""First byte of what a client of TLS sends."""


class HealthGate:
    """What `serve_health` lets in: clients that speak TLS, and to metrics and waits those with a certificate.

    Raises:
        SettingsError: a file is wrong.
    """

    def __init__(self, tls: TlsSettings, service: str) -> None:
        self._context = make_server_context(tls)
        self._requires = tls.require_client_cert
        self._wire = f"{service}/health"

    def admit(self, connection: socket.socket, peer: str) -> socket.socket | None:
        """Do the handshake; None if it fails. Blocks for ten seconds at most."""
        if self._context is None:
            return connection
        try:
            connection.settimeout(HANDSHAKE_S)
            first = connection.recv(1, socket.MSG_PEEK)
            if not first:
                return None  # a check of the port without a byte, as load balancers do
            if first != _TLS_HANDSHAKE:
                record_refusal(self._wire, Refusal.TLS_FAILED, peer, "plain text")
                connection.sendall(PLAIN_TEXT_REPLY)
                _linger(connection)
                return None
            secure = self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        except OSError as error:
            self._refuse(peer, error)
            return None
        try:
            secure.do_handshake()
        except OSError as error:
            self._refuse(peer, error)
            _linger(secure)
            secure.close()
            return None
        return secure

    def refuse(self, connection: socket.socket, path: str, peer: str) -> str:
        """Why a request may not pass; empty if it may."""
        if not self._requires or path in PROBES:
            return ""
        if isinstance(connection, ssl.SSLSocket) and name_certificate(connection.getpeercert()):
            return ""
        record_refusal(self._wire, Refusal.NO_CERTIFICATE, peer)
        return NO_CERTIFICATE

    def _refuse(self, peer: str, error: OSError) -> None:
        if isinstance(error, TimeoutError):
            record_refusal(self._wire, Refusal.TLS_FAILED, peer, f"no handshake within {HANDSHAKE_S:g} s")
        elif isinstance(error, ssl.SSLError):
            record_refusal(self._wire, Refusal.TLS_FAILED, peer, str(error.reason))


def _linger(connection: socket.socket) -> None:
    """Let the client read what was sent last: a connection that is closed with something unread is reset, and loses it.

    With the functions of plain sockets, for those of TLS do nothing after a handshake that has failed.
    """
    deadline = time.monotonic() + LINGER_S
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_WR)
        while (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            if not socket.socket.recv(connection, _READ_BYTES):
                return
