"""A retriever that always takes the same time: the wire format over plain asyncio, at next to no cost of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import plan


@dataclass
class SlowRetriever:
    """Answers `/retrieve` after `delay_s`, whatever the number of queries; everything else at once."""

    delay_s: float = 0.005
    queries: int = 0

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one keep-alive connection."""
        try:
            while request := (await reader.readline()).decode():
                length = 0
                while (header := (await reader.readline()).decode().strip()) != "":
                    name, _, value = header.partition(":")
                    length = int(value) if name.lower() == "content-length" else length
                body = await reader.readexactly(length)
                reply = await self._retrieve(body) if "/retrieve" in request else b"{}"
                head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(reply)}\r\n\r\n"
                writer.write(head.encode() + reply)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _retrieve(self, body: bytes) -> bytes:
        await asyncio.sleep(self.delay_s)
        queries = json.loads(body)["queries"]
        self.queries += len(queries)
        pairs = [[{"document": {"id": q, "contents": plan.build_document(q)}, "score": 1.0}] for q in queries]
        return json.dumps({"result": pairs}).encode()


@contextmanager
def serve_slow_retriever(address: str) -> Iterator[SlowRetriever]:
    """Serve from a thread of its own until the block ends."""
    host, _, port = address.rpartition(":")
    retriever, loop = SlowRetriever(), asyncio.new_event_loop()
    loop.run_until_complete(asyncio.start_server(retriever.serve_connection, host, int(port)))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield retriever
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
