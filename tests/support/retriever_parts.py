"""Parts of the retriever for its tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
from prometheus_client import REGISTRY

from forage_common.errors import UnavailableError
from forage_common.settings import RetrievalMode, RetrieverSettings, Settings
from forage_common.telemetry.health import Health
from forage_retriever.corpus.read import Passage
from forage_retriever.corpus.store import Corpus, CorpusWriter
from forage_retriever.hits import Filters, Hit, Searcher
from forage_retriever.index.load import Index
from forage_retriever.serve.front import Front
from forage_retriever.serve.grpc_api import GrpcServer
from forage_retriever.serve.http_api import make_app
from forage_retriever.serve.retrieval import Results, Retrieval
from forage_retriever.serve.source import LocalSource

DEFAULT_TOPK = 3


class Recorder:
    """Wraps a searcher, records its calls, and can be blocked."""

    def __init__(self, inner: Searcher) -> None:
        self.inner = inner
        self.asked: list[tuple[list[str], int]] = []
        self.down = 0  # searches that fail before one succeeds
        self.open = threading.Event()
        self.open.set()
        self.busy = threading.Event()

    def search(self, queries: Sequence[str], topk: int, filters: Filters = ()) -> list[list[Hit]]:
        self.busy.set()
        self.open.wait(30)
        self.asked.append((list(queries), topk))
        if self.down:
            self.down -= 1
            raise UnavailableError("the encoder is down")
        if "poison" in queries:
            raise RuntimeError("poison")
        return self.inner.search(queries, topk, filters)


def write_corpus(folder: Path, passages: Iterable[Passage], filter_fields: Sequence[str] = ()) -> Corpus:
    """A corpus store of these passages in an empty folder."""
    writer = CorpusWriter(folder, filter_fields)
    for passage in passages:
        writer.add_passage(passage)
    return writer.finish()


def record_bm25(index: Index) -> tuple[Index, Recorder]:
    """The index with its BM25 searcher recorded."""
    recorder = Recorder(index.searchers["bm25"])
    return replace(index, searchers={**index.searchers, "bm25": recorder}), recorder


@asynccontextmanager
async def open_retrieval(index: Index, timeout_s: float = 30.0, max_waiting: int = 8192) -> AsyncIterator[Retrieval]:
    """A retrieval over an index."""
    core = Retrieval(DEFAULT_TOPK, timeout_s)
    core.set_source(LocalSource(index, max_waiting))
    try:
        yield core
    finally:
        await core.stop()


async def wait_until_queued(queries: int) -> None:
    """Wait until so many queries are in the queue."""
    async with asyncio.timeout(30):
        while REGISTRY.get_sample_value("forage_retriever_waiting_queries") != queries:
            await asyncio.sleep(0.01)


def open_http_client(
    core: Retrieval, health: Health | None = None, swap: SimpleNamespace | None = None
) -> httpx.AsyncClient:
    """A client of the HTTP application, in this process."""
    app = make_app(core, health or Health(), swap)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://retriever")


@asynccontextmanager
async def serve_shard(index: Index, address: str, max_waiting: int = 1000) -> AsyncIterator[Retrieval]:
    """Serve an index over gRPC."""
    core = Retrieval(DEFAULT_TOPK, 30.0)
    core.set_source(LocalSource(index, max_waiting))
    server = GrpcServer(Settings(retriever=RetrieverSettings(grpc_address=address)), core, Health())
    await server.start()
    try:
        yield core
    finally:
        await server.stop(0)
        await core.stop()


@asynccontextmanager
async def serve_merger(
    *addresses: str, timeout_s: float = 30.0, mode: RetrievalMode = RetrievalMode.BM25
) -> AsyncIterator[Retrieval]:
    """A retrieval over the retrievers at these addresses."""
    settings = RetrieverSettings(mode=mode, shards=addresses, queue_timeout_s=timeout_s, max_waiting=100)
    merged = Front(Settings(retriever=settings), Health())
    core = Retrieval(DEFAULT_TOPK, timeout_s)
    core.set_source(merged)
    await asyncio.wait_for(merged.start(), 30)
    try:
        yield core
    finally:
        await core.stop()


def list_ids(results: Results) -> list[list[str]]:
    """The ids that were found, by query."""
    return [[result.passages.ids[hit.row] for hit in result.hits] for result in results.per_query]
