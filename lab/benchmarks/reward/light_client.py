"""Lightweight clients of one unary gRPC method: gRPC's own client takes half of the CPU time of the service.

Implements the part of HTTP/2 (RFC 9113) that requests of one frame need. Each client has one connection and one call in
flight, and sends the next when the reply has arrived.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 0x1
END_HEADERS = 0x4
MAX_FRAME = 16_384
PREFIX = 5
"""Bytes before a gRPC message: the compression flag and the length."""


def build_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def build_header_block(authority: str, path: str) -> bytes:
    """Encode the headers with HPACK (RFC 7541): indexed fields, and literals without indexing."""

    def encode_text(value: str) -> bytes:
        return bytes([len(value)]) + value.encode()

    post, http, path_name, authority_name, content_type_name = b"\x83", b"\x86", b"\x04", b"\x01", b"\x0f\x10"
    trailers = b"\x00" + encode_text("te") + encode_text("trailers")
    return (
        post + http + path_name + encode_text(path) + authority_name + encode_text(authority)
        + content_type_name + encode_text("application/grpc") + trailers
    )  # fmt: skip


class Client(asyncio.Protocol):
    """One connection. `times` holds the seconds of each call; `check` is called with the last reply."""

    def __init__(self, block: bytes, requests: Sequence[bytes], until: float, check: Callable[[bytes], None]) -> None:
        self.times: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._block, self._requests, self._until, self._check = block, requests, until, check
        self._stream = -1
        self._received = bytearray()
        self._reply = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(
            PREFACE + build_frame(SETTINGS, 0, 0) + build_frame(WINDOW_UPDATE, 0, 0, (2**31 - 2**16).to_bytes(4, "big"))
        )
        self._call()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the service closed the connection"))

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        while len(received) >= 9:
            end = 9 + int.from_bytes(received[:3], "big")
            if len(received) < end:
                return
            kind, flags, payload = received[3], received[4], bytes(received[9:end])
            del received[:end]
            if kind == DATA:
                self._reply += payload
            elif kind == HEADERS and flags & END_STREAM:
                self._finish()
            elif kind in (SETTINGS, PING) and not flags & ACK:
                self._transport.write(build_frame(kind, ACK, 0, payload if kind == PING else b""))
            elif kind in (RST_STREAM, GOAWAY):
                self._transport.abort()

    def _call(self) -> None:
        self._stream += 2
        self._reply = b""
        message = self._requests[self._stream // 2 % len(self._requests)]
        body = b"\0" + len(message).to_bytes(4, "big") + message
        assert len(body) <= MAX_FRAME, "a request must fit one frame"
        self._began = time.perf_counter()
        self._transport.write(
            build_frame(HEADERS, END_HEADERS, self._stream, self._block)
            + build_frame(DATA, END_STREAM, self._stream, body)
        )

    def _finish(self) -> None:
        now = time.perf_counter()
        self.times.append(now - self._began)
        if now < self._until:
            return self._call()
        try:
            self._check(self._reply[PREFIX:])
            self.done.set_result(None)
        except AssertionError as error:
            self.done.set_exception(error)
        self._transport.close()


async def run_clients(
    address: str, path: str, requests: Sequence[bytes], clients: int, until: float, check: Callable[[bytes], None]
) -> list[float]:
    """Run clients until a time of `time.perf_counter`; returns the seconds of every call."""
    host, _, port = address.rpartition(":")
    block = build_header_block(address, path)
    connections = []
    for number in range(clients):
        own = [*requests[number * 31 % len(requests) :], *requests[: number * 31 % len(requests)]]
        client = Client(block, own, until, check)
        await asyncio.get_running_loop().create_connection(lambda client=client: client, host, int(port))
        connections.append(client)
    await asyncio.gather(*(client.done for client in connections))
    return [seconds for client in connections for seconds in client.times]
