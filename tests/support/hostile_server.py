"""An HTTP server that wishes its callers ill: on a real socket, byte by byte as it likes."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Serve = Callable[[socket.socket], None]
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


class HostileServer:
    """Answers every connection with `serve`; keeps what callers sent."""

    def __init__(self) -> None:
        self.serve: Serve = say(OK + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}")
        self.requests: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(120)
            self.requests.append(connection.recv(2**16))
            self.serve(connection)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)  # the client closes first, so that nothing it has not read is lost


@contextmanager
def open_hostile_server() -> Iterator[HostileServer]:
    server = HostileServer()
    try:
        yield server
    finally:
        server.close()


def say(content: bytes) -> Serve:
    return lambda connection: connection.sendall(content)


def drip(content: bytes) -> Serve:
    """A byte every 20 ms: each comes in time, the reply never does."""

    def serve(connection: socket.socket) -> None:
        for byte in content:
            connection.sendall(bytes([byte]))
            time.sleep(0.02)

    return serve


def pour(head: bytes, part: bytes) -> Serve:
    """Ten gigabytes, or as much as the client takes."""

    def serve(connection: socket.socket) -> None:
        connection.sendall(head)
        for _ in range(10 * 2**30 // len(part)):
            connection.sendall(part)

    return serve


def redirect_to(url: str, status: int = 307) -> Serve:
    return say(b"HTTP/1.1 %d Gone\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % (status, url.encode()))


_ZIPPED = gzip.compress(b"0" * 2**26, 9)
_MEBI = b"x" * 2**20
_CHUNK = b"100000\r\n" + _MEBI + b"\r\n"

TOO_LARGE: dict[str, Serve] = {
    "a length of 10 GB": pour(OK + b"Content-Length: 10737418240\r\n\r\n", _MEBI),
    "10 GB in chunks": pour(OK + b"Transfer-Encoding: chunked\r\n\r\n", _CHUNK),
    "10 GB until the end": pour(OK + b"\r\n", _MEBI),
    "64 MB in 64 kB": say(OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(_ZIPPED) + _ZIPPED),
    "zstd": say(OK + b"Content-Encoding: zstd\r\nContent-Length: 4\r\n\r\nxxxx"),
}
"""Replies that would exhaust the memory of whoever reads them whole."""

SLOW: dict[str, Serve] = {
    "head": drip(OK + b"X-A: " + b"a" * 5000),
    "body": drip(OK + b"Content-Length: 5000\r\n\r\n" + b"a" * 5000),
    "chunks": drip(OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 1000),
    "nothing": lambda connection: time.sleep(5),
}
"""Replies whose every byte comes in time."""

NONSENSE: dict[str, Serve] = {
    "html": say(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 12\r\n\r\n<html>\x1b[2J\xff\xfe"),
    "deep": say(OK + b"Content-Length: 200000\r\n\r\n" + b"[" * 200_000),
    "large number": say(OK + b"Content-Length: 10000\r\n\r\n" + b"9" * 10_000),
    "null": say(OK + b"Content-Length: 4\r\n\r\nnull"),
    "infinite": say(OK + b"Content-Length: 19\r\n\r\n[[1e400, NaN, 1e39]]"[:-1] + b"]"),
    "no http": say(b"\x00\xff\x1b[2J"),
    "lying length": say(OK + b"Content-Length: 100\r\n\r\n{}"),
}
"""Replies that are no answer."""
