"""Servers and clients of the retriever for its tests: in this process, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
from prometheus_client import REGISTRY
from retriever_parts import DEFAULT_TOPK, LONG_S
from waiting import WAIT_S, wait_until_async

from forage_retriever.index.load import Index
from forage_retriever.serve.front import Front
from forage_retriever.serve.grpc_api import GrpcServer
from forage_retriever.serve.http_api import make_app
from forage_retriever.serve.retrieval import Retrieval
from forage_retriever.serve.source import LocalSource
from forage_runtime.settings import RetrievalMode, RetrieverSettings, Settings
from forage_runtime.telemetry.health import Health


def count_queued() -> int:
    """Count the queries in the queue."""
    return int(REGISTRY.get_sample_value("forage_retriever_waiting_queries") or 0)


async def wait_until_queued(queries: int) -> None:
    """Wait until so many queries are in the queue."""
    await wait_until_async(lambda: count_queued() == queries, lambda: f"{queries} in the queue, not {count_queued()},")


def open_http_client(
    core: Retrieval, health: Health | None = None, swap: SimpleNamespace | None = None
) -> httpx.AsyncClient:
    """A client of the HTTP application, in this process."""
    app = make_app(core, health or Health(), swap)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://retriever")


@asynccontextmanager
async def serve_shard(index: Index, address: str, max_waiting: int = 1000) -> AsyncIterator[Retrieval]:
    """Serve an index over gRPC."""
    core = Retrieval(DEFAULT_TOPK, LONG_S)
    core.set_source(LocalSource(index, max_waiting))
    server = GrpcServer(Settings(retriever=RetrieverSettings(grpc_address=address)), core, Health())
    await server.start()
    try:
        yield core
    finally:
        await server.stop(0)
        await core.stop()


@asynccontextmanager
async def serve_merger(*addresses: str, mode: RetrievalMode = RetrievalMode.BM25) -> AsyncIterator[Retrieval]:
    """A retrieval over the retrievers at these addresses."""
    settings = RetrieverSettings(mode=mode, shards=addresses)
    merged = Front(Settings(retriever=settings), Health(), max_waiting=100)
    core = Retrieval(DEFAULT_TOPK, LONG_S)
    core.set_source(merged)
    await asyncio.wait_for(merged.start(), WAIT_S)
    try:
        yield core
    finally:
        await core.stop()
