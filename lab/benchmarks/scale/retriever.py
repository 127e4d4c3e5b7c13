"""The retriever's stand-in: the wire format over plain asyncio, at next to no cost, after 0.2 to 2 seconds.

    python retriever.py HOST:PORT

Every search is answered by one of `_ANSWERS`; which one, and when, is a hash of the query.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import zlib

from workload import build_documents, draw_delay_s

_ANSWERS = 64


class Retriever:
    """Answers `/retrieve`; everything else at once with an empty object."""

    def __init__(self) -> None:
        self._answers = [_encode_answer(number) for number in range(_ANSWERS)]
        chance = random.Random("delays")
        self._delays = [draw_delay_s(chance) for _ in range(997)]

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one keep-alive connection."""
        try:
            while request := await reader.readline():
                length = 0
                while (header := (await reader.readline()).strip()) != b"":
                    name, _, value = header.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                body = await reader.readexactly(length)
                reply = await self._retrieve(body) if b"/retrieve" in request else b"{}"
                head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(reply)}\r\n\r\n"
                writer.write(head.encode() + reply)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _retrieve(self, body: bytes) -> bytes:
        queries = json.loads(body)["queries"] if body else []
        number = zlib.crc32(repr(queries).encode())
        await asyncio.sleep(self._delays[number % len(self._delays)])
        return b'{"result": [%s]}' % b", ".join(self._answers[(number + i) % _ANSWERS] for i in range(len(queries)))


def _encode_answer(number: int) -> bytes:
    texts = build_documents(f"topic {number}")
    pairs = [
        {"document": {"id": f"{number}-{rank}", "contents": text}, "score": 1.0 - rank / 10}
        for rank, text in enumerate(texts)
    ]
    return json.dumps(pairs).encode()


async def serve(address: str) -> None:
    """Serve until the process is ended."""
    host, _, port = address.rpartition(":")
    server = await asyncio.start_server(Retriever().serve_connection, host, int(port), backlog=4096)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
