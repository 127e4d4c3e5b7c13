"""What a Service of Kubernetes does: each new connection goes to the next of the servers that there are then."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator


class Balancer:
    """Passes the bytes of connections on.

    Attributes:
        servers: addresses; may change at any time.
        address: where it listens.
    """

    def __init__(self, *servers: str) -> None:
        self.servers = list(servers)
        self.address = ""
        self._turns = itertools.count()
        self._open: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        host, _, port = self.servers[next(self._turns) % len(self.servers)].rpartition(":")
        answers, requests = await asyncio.open_connection(host, int(port))
        self._open |= {writer, requests}
        await asyncio.gather(_copy(reader, requests), _copy(answers, writer))
        self._open -= {writer, requests}
        self._serving.discard(task)

    async def close(self) -> None:
        """End the connections."""
        for writer in self._open:
            writer.transport.abort()
        await asyncio.gather(*self._serving, return_exceptions=True)


@contextlib.asynccontextmanager
async def open_balancer(*servers: str) -> AsyncIterator[Balancer]:
    """Balance on a port of loopback until the end of the block."""
    balancer = Balancer(*servers)
    listening = await asyncio.start_server(balancer.serve, "127.0.0.1", 0)
    balancer.address = "{}:{}".format(*listening.sockets[0].getsockname())
    try:
        yield balancer
    finally:
        listening.close()
        await balancer.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while part := await source.read(2**16):
            target.write(part)
            await target.drain()
    target.close()
