"""A stranger without a token holds neither memory nor connections: what uvicorn itself does not limit."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, cycle, repeat
from typing import Any

import pytest
import uvicorn
from waiting import WAIT_S, wait_until

from forage_runtime.security.http import limits
from forage_runtime.security.http.limits import HEAD_BYTES, BoundedProtocol, QuietConnections

MOST_QUIET = 4
_ASK = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def answer(scope: Any, _: Any, send: Any) -> None:
    """Answers before it reads a body, as a guard that refuses does."""
    body = bytes(2**23) if scope["path"] == "/large" else b"answered"
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body[:1], "more_body": True})
    await send({"type": "http.response.body", "body": body[1:]})


class Remembered(BoundedProtocol):
    """A protocol whose last connection the tests look at."""

    last: BoundedProtocol

    def connection_made(self, transport: asyncio.Transport) -> None:
        Remembered.last = self
        super().connection_made(transport)


@contextmanager
def serving() -> Iterator[tuple[str, int]]:
    listening = socket.create_server(("127.0.0.1", 0))
    protocol = partial(Remembered, QuietConnections(MOST_QUIET))
    config = uvicorn.Config(answer, http=protocol, log_config=None, lifespan="off", ws="none", timeout_keep_alive=300)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield listening.getsockname()
    finally:
        server.should_exit = True
        thread.join(WAIT_S)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, int]]:
    with serving() as address:
        yield address


@pytest.fixture
def address(served: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """Of a server whose limits of time are long, unless a test shortens them."""
    monkeypatch.setattr(limits, "HEAD_S", 300.0)
    monkeypatch.setattr(limits, "STALLED_S", 300.0)
    return served


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, WAIT_S)


def read_all(connection: socket.socket) -> bytes:
    parts = []
    try:
        while part := connection.recv(2**16):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def flood(connection: socket.socket, part: bytes) -> None:
    for _ in range(2**23 // len(part)):  # far more than buffers of the network hold
        connection.sendall(part)


def drip(connection: socket.socket, content: Iterable[int]) -> None:
    """Send bytes one by one, until the connection has ended."""
    for byte in content:
        connection.send(bytes([byte]))
        time.sleep(0.05)


def is_answered(connection: socket.socket) -> bool:
    answered = b""
    while not answered.endswith(b"answered"):  # it may come in parts
        part = connection.recv(2**16)
        if not part:
            return False
        answered += part
    return answered.startswith(b"HTTP/1.1 200")


def is_served(connection: socket.socket) -> bool:
    connection.sendall(_ASK)
    return is_answered(connection)


@pytest.mark.parametrize("begin", [b"GET / HTTP/1.1\r\nHost: x\r\nX-A: ", b"GET /", b"GET / HTTP/1.1\r\n"])
def test_a_head_without_end_is_refused(address: tuple[str, int], begin: bytes) -> None:
    more = b"a" * 2**12 if not begin.endswith(b"\n") else b"A: a\r\n" * 2**9
    with connect(address) as caller:
        caller.sendall(begin)
        with pytest.raises(ConnectionError):
            flood(caller, more)


def test_the_refusal_of_a_large_head_says_why(address: tuple[str, int]) -> None:
    with connect(address) as caller:
        caller.sendall(b"GET / HTTP/1.1\r\nX-A: " + b"a" * HEAD_BYTES)
        assert read_all(caller).startswith(b"HTTP/1.1 431")


def test_trailers_without_end_are_refused(address: tuple[str, int]) -> None:
    with connect(address) as caller:
        caller.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX-A: ")
        with pytest.raises(ConnectionError):
            flood(caller, b"a" * 2**12)


def test_silent_connections_take_no_place_of_others(address: tuple[str, int]) -> None:
    silent = [connect(address) for _ in range(3 * MOST_QUIET)]
    with connect(address) as caller:
        assert is_served(caller)
        assert is_served(caller)  # the connection is kept
    assert read_all(silent[0]) == b""  # the oldest ones have ended
    for one in silent:
        one.close()


def test_a_slow_head_ends(monkeypatch: pytest.MonkeyPatch, address: tuple[str, int]) -> None:
    with connect(address) as later:
        assert is_served(later)
        monkeypatch.setattr(limits, "HEAD_S", 0.2)
        with connect(address) as silent, connect(address) as slow:
            with pytest.raises(ConnectionError):
                drip(slow, chain(b"GET / HTTP/1.1\r\nX-A: ", repeat(ord("a"))))
            assert read_all(silent) == b""
        assert is_served(later)  # it sent nothing meanwhile, and its time is that of idle connections
        later.sendall(_ASK[:10])
        assert read_all(later) == b""


def test_a_body_that_is_not_wanted_may_end(address: tuple[str, int]) -> None:
    with connect(address) as caller:
        caller.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n\r\n")
        assert is_answered(caller)
        caller.sendall(b"a" * 150_000)
        wait_until(lambda: Remembered.last._late is not None)  # its time is that of a head
        caller.sendall(b"a" * 150_000)
        wait_until(lambda: Remembered.last.timeout_keep_alive_task is not None)
        assert Remembered.last._late is None, "the connection would end"
        assert is_served(caller)


def test_an_answer_that_nobody_reads_is_given_up(monkeypatch: pytest.MonkeyPatch, address: tuple[str, int]) -> None:
    monkeypatch.setattr(limits, "STALLED_S", 0.2)
    with connect(address) as caller:
        caller.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        with pytest.raises(ConnectionError):
            drip(caller, cycle(b"\r\n"))
