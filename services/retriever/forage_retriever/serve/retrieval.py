"""What both transports serve: checked requests, answered from the cache or by a source, once there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Histogram

from forage_common.telemetry import tracing
from forage_retriever.hits import Filters, Provenance
from forage_retriever.serve.batcher import SearchOptions
from forage_retriever.serve.cache import LruCache
from forage_retriever.serve.source import InvalidRequestError, QueryResult, Source

MAX_QUERIES = 4096
MAX_DOCUMENTS = 100_000
"""In one reply."""

MAX_FILTER_VALUES = 1000
MAX_URLS = 64
CACHED_RESULTS = 32_768
MAX_CACHED_CHARS = 1000
"""Of a query; longer ones hardly come twice."""

QUERIES = Counter("forage_retriever_queries_total", "Queries answered", ["cache"])
PARTIAL = Counter("forage_retriever_partial_queries_total", "Queries answered without one of the shards")
TIMEOUTS = Counter("forage_retriever_timeouts_total", "Requests given up after retriever.queue_timeout_s")
SECONDS = Histogram(
    "forage_retriever_request_seconds",
    "Time to answer all queries of a request, in the queue or from the cache included",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
_HITS, _MISSES = QUERIES.labels("hit"), QUERIES.labels("miss")


class NotReadyError(Exception):
    """There is no index yet; the message says what is being waited for."""


@dataclass(frozen=True)
class Results:
    """What was found for each query, and what answered."""

    provenance: Provenance
    per_query: Sequence[QueryResult]

    @property
    def partial(self) -> bool:
        """Whether a shard of the index was missing."""
        return any(found.partial for found in self.per_query)


class Retrieval:
    """Searches a source that comes later and may be exchanged. All methods belong to one event loop."""

    def __init__(self, default_topk: int, timeout_s: float) -> None:
        self._default_topk = default_topk
        self._timeout_s = timeout_s
        self._source: Source | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._cache: LruCache[tuple[str, SearchOptions, str], QueryResult] = LruCache(CACHED_RESULTS)

    @property
    def provenance(self) -> Provenance | None:
        """What is being searched; None before there is anything."""
        return self._source.provenance if self._source is not None else None

    def set_source(self, source: Source) -> None:
        """Search this from now on; what was searched before finishes what it has in hand, and is closed."""
        self._retire()
        self._source = source
        self._cache.clear()

    async def stop(self) -> None:
        """Search no more."""
        self._retire()
        self._source = None
        await asyncio.gather(*self._retiring)

    async def retrieve(self, queries: Sequence[str], topk: int = 0, filters: Filters = (), mode: str = "") -> Results:
        """The best `topk` passages for each query; 0 stands for the default, and no corpus gives more than it has.

        Args:
            filters: what a passage must pass.
            mode: one of the index's; empty for its default.

        Raises:
            InvalidRequestError: the request asks for too much, or for what is not there.
            NotReadyError: there is no index yet.
            OverloadedError: too many queries are waiting.
            TimeoutError: there was no answer within the time limit.
        """
        _check_request(queries, topk, filters)
        source = self._get_source()
        before = source.provenance
        options = source.fit_options(SearchOptions(mode or before.mode, topk or self._default_topk, filters))
        if options.topk * len(queries) > MAX_DOCUMENTS:
            raise InvalidRequestError(
                f"{len(queries)} queries of {options.topk} documents are more than {MAX_DOCUMENTS} documents in one"
                " reply: ask for fewer at a time"
            )
        found = {query: self._cache.get((before.index, options, query)) for query in queries}
        missing = [query for query, known in found.items() if known is None]
        provenance = Provenance(before.corpus, before.encoder, before.index, options.mode)
        if missing:
            provenance, searched = await self._search(source, missing, options)
            if provenance.index != before.index and len(missing) < len(found):
                return await self.retrieve(queries, topk, filters, mode)  # a shard has another index by now
            found.update(zip(missing, searched, strict=True))
            if source is self._source:
                self._remember(provenance.index, options, missing, searched)
        _MISSES.inc(len(missing))
        _HITS.inc(len(queries) - len(missing))
        return Results(provenance, [known for query in queries if (known := found[query]) is not None])

    async def find_pages(self, urls: Sequence[str]) -> list[dict[str, Any] | None]:
        """For each address the page that its passages make, or None.

        Raises:
            InvalidRequestError: too many addresses, or passages cannot be found by address here.
            NotReadyError: there is no index yet.
        """
        if len(urls) > MAX_URLS:
            raise InvalidRequestError(f"{len(urls)} urls are more than {MAX_URLS} in one request: split it")
        return await self._get_source().find_pages(urls)

    def _get_source(self) -> Source:
        if self._source is None:
            raise NotReadyError("the index is not ready yet")
        return self._source

    async def _search(
        self, source: Source, queries: Sequence[str], options: SearchOptions
    ) -> tuple[Provenance, Sequence[QueryResult]]:
        try:
            with tracing.span("retriever.index", {"forage.queries": len(queries), "forage.mode": options.mode}):
                async with asyncio.timeout(self._timeout_s):
                    return await source.search(queries, options)
        except TimeoutError:
            TIMEOUTS.inc()
            raise

    def _remember(
        self, index: str, options: SearchOptions, queries: Sequence[str], searched: Sequence[QueryResult]
    ) -> None:
        for query, found in zip(queries, searched, strict=True):
            if found.partial:
                PARTIAL.inc()
            elif len(query) <= MAX_CACHED_CHARS:
                self._cache.put((index, options, query), found)

    def _retire(self) -> None:
        if self._source is not None:
            closing = asyncio.create_task(self._source.close())
            self._retiring.add(closing)
            closing.add_done_callback(self._retiring.discard)


def _check_request(queries: Sequence[str], topk: int, filters: Filters) -> None:
    if topk < 0:
        raise InvalidRequestError(f"topk is {topk}: give a positive number, or 0 for the server's default")
    if len(queries) > MAX_QUERIES:
        raise InvalidRequestError(f"{len(queries)} queries are more than {MAX_QUERIES} in one request: split it")
    if (values := sum(len(accepted) for _, accepted in filters)) > MAX_FILTER_VALUES:
        raise InvalidRequestError(
            f"{values} filter values are more than {MAX_FILTER_VALUES} in one request: give fewer"
        )
