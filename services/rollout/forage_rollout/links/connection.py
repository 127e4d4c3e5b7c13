"""What both ends of a connection share: frames in and out, known errors, and the proof that each knows the key."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import cast

from forage_rollout.links.frames import FrameError, FrameReader, Kind, pack_frame
from forage_runtime.clients.calls import MalformedReplyError, RefusedError
from forage_runtime.errors import ForageError, UnavailableError
from forage_runtime.telemetry.logs import get_logger
from forage_weights.rollout.policy import EngineLostError, NotServingError

log = get_logger()
NONCE_BYTES = 16
PROVING_LIMIT = 64
"""Bytes of a body until the other end has proved that it knows the key."""
BODY_LIMIT = 256 * 2**20
# A machine that is gone says nothing: without these a connection to it would last for ever.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 25_000))


class FrameConnection(asyncio.Protocol, ABC):
    """One end of a connection. What is sent in one turn of the event loop goes out in one write."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(PROVING_LIMIT)
        self._outgoing: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    @abstractmethod
    def take(self, kind: int, number: int, body: bytes) -> None:
        """Act on a frame that has arrived.

        Raises:
            FrameError: it must not come now; the connection is closed.
        """

    @property
    def peer(self) -> str:
        """Address of the other end, for logs."""
        name = self._transport and self._transport.get_extra_info("peername")
        return f"{name[0]}:{name[1]}" if name else "unknown"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's, which Ray uses, is no subclass
        connected: socket.socket | None = transport.get_extra_info("socket")
        if connected is not None:
            with suppress(OSError):  # a socket that has ended already, or is none of TCP
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in _KEEPALIVE:
                    if hasattr(socket, name):
                        connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        try:
            for kind, number, body in self._reader.feed(data):
                if self._transport is None or self._transport.is_closing():
                    return
                self.take(kind, number, body)
        except FrameError as error:
            log.warning("link_broken", peer=self.peer, detail=str(error))
            self.abort()

    def send(self, kind: Kind, number: int = 0, body: bytes = b"") -> None:
        """Send a frame; on a connection that has ended nothing happens."""
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(pack_frame(kind, number, body))

    def close(self) -> None:
        """End the connection once what was sent is out."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def allow_requests(self) -> None:
        """Take bodies of any kind from now on: the other end has proved who it is."""
        self._reader.limit = BODY_LIMIT

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if outgoing and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(outgoing))


def draw_nonce() -> bytes:
    """A number that is used once."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(key: bytes, of: Kind, *nonces: bytes) -> bytes:
    """The proof that an end knows the key; PROOF and WELCOME differ, so that none can be sent back."""
    return hmac.digest(key, b"forage engine link" + bytes([of]) + b"".join(nonces), "sha256")


def is_proof(given: bytes, key: bytes, of: Kind, *nonces: bytes) -> bool:
    """Whether the other end knows the key; compares in constant time."""
    return hmac.compare_digest(given, prove(key, of, *nonces))


class EngineError(ForageError):
    """An engine failed in a way that nobody foresaw; its log says how."""


class LinkLostError(ForageError):
    """The connection to an engine ended before its reply."""


_KINDS: tuple[type[Exception], ...] = (
    EngineError,
    EngineLostError,  # before its base
    NotServingError,
    UnavailableError,
    RefusedError,
    MalformedReplyError,
    ValueError,
)


def is_foreseen(error: Exception) -> bool:
    """Whether an error keeps its type."""
    return isinstance(error, _KINDS)


def pack_failure(error: Exception) -> bytes:
    """The body of FAILED, but for the load before it."""
    kind = next((i for i, one in enumerate(_KINDS) if isinstance(error, one)), 0)
    text = str(error) if is_foreseen(error) else f"{type(error).__name__}: {error}"
    return bytes([kind]) + text.encode(errors="replace")


def unpack_failure(body: bytes) -> Exception:
    """What `pack_failure` has packed.

    Raises:
        FrameError: the bytes are no failure.
    """
    if not body or body[0] >= len(_KINDS):
        raise FrameError("no failure that is known here")
    return _KINDS[body[0]](body[1:].decode(errors="replace"))
