"""A retriever that speaks HTTP over raw sockets and fails on order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from forage_runtime.clients import retriever

ROW = {"document": {"id": 7, "contents": '"T"\ntext', "url": "x"}, "score": 0.5}
GOOD = {"result": [[ROW]]}
RESET, HANG, NOT_HTTP = "reset", "hang", "not http"
Reply = tuple[int, dict[str, str], bytes]
Order = str | Reply | Callable[[dict[str, Any]], Reply]
"""What happens to a request: a failure, a reply, or the reply to its body."""


def build_reply(body: Any = GOOD, status: int = 200, **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return status, named, body if isinstance(body, bytes) else json.dumps(body).encode()


class FailingServer:
    """Speaks HTTP over raw sockets: carries out one order a request, the last one again and again."""

    def __init__(self) -> None:
        self.orders: list[Order] = [build_reply()]
        self.requests: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.connections = 0
        self.address = ""
        self._turns: asyncio.Semaphore | None = None

    def hold(self) -> None:
        """Answer only as many requests as `release` says."""
        self._turns = asyncio.Semaphore(0)

    def release(self, requests: int) -> None:
        assert self._turns is not None
        for _ in range(requests):
            self._turns.release()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next(int(line[15:]) for line in head.splitlines() if line.startswith("content-length:"))
        request = json.loads(await reader.readexactly(length))
        self.requests.append(request)
        self.times.append(asyncio.get_running_loop().time())
        if self._turns is not None:
            await self._turns.acquire()
        order = self.orders.pop(0) if len(self.orders) > 1 else self.orders[0]
        if order == RESET:
            return False
        if order == HANG:
            await asyncio.Event().wait()
        if isinstance(order, str):
            writer.write(b"220 smtp.example ready\r\n")
            return False
        status, headers, body = order(request) if callable(order) else order
        lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *(f"{k}: {v}" for k, v in headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()
        return True


@pytest.fixture
def one_search_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches that begin together are not sent together."""
    monkeypatch.setattr(retriever, "MERGED", 1)


@pytest.fixture
async def server() -> AsyncIterator[FailingServer]:
    async with open_failing_server() as failing:
        yield failing


@asynccontextmanager
async def open_failing_server() -> AsyncIterator[FailingServer]:
    """Serve on a port of loopback until the end of the block."""
    failing = FailingServer()
    listening = await asyncio.start_server(failing.serve, "127.0.0.1", 0)
    failing.address = "{}:{}".format(*listening.sockets[0].getsockname())
    try:
        yield failing
    finally:
        listening.close()
