"""The core behind both transports: checks requests and answers them from the cache or a source."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import Any

from prometheus_client import Counter, Histogram

from forage_retriever.hits import Filters, Provenance
from forage_retriever.serve.cache import LruCache
from forage_retriever.serve.source import Answer, InvalidRequestError, QueryResult, Source
from forage_retriever.serve.urgency import PATIENT, Urgency
from forage_retriever.serve.waiting import SearchOptions
from forage_runtime.errors import UnavailableError
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.waits import waiting

ANSWER_LIMIT_S = 300.0
"""Longest wait of a request that names no limit of its own: clients of other projects do not, and end at their first
error, while a start, a reload or a full queue passes within minutes."""

MAX_QUERIES = 65_536
MAX_DOCUMENTS = 100_000
"""In one reply."""

MAX_FILTER_VALUES = 1000
MAX_URLS = 64
MAX_CACHED_CHARS = 1000
"""Limit of a cached query; longer ones are rarely repeated."""

AGAIN_S = 0.25
"""Pause before a request is tried again that met no index, or an encoder that is down."""

_ENTRY_BYTES, _HIT_BYTES = 1200, 128
"""As measured: of an entry without hits, and of each hit."""

QUERIES = Counter("forage_retriever_queries_total", "Queries answered", ["cache"])
PARTIAL = Counter("forage_retriever_partial_queries_total", "Queries answered without one of the shards")
TIMEOUTS = Counter("forage_retriever_timeouts_total", "Requests given up after 300 s, or their own limit")
SECONDS = Histogram(
    "forage_retriever_request_seconds",
    "Time to answer all queries of a request, waiting in the queue included",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
_HITS, _MISSES = QUERIES.labels("hit"), QUERIES.labels("miss")


class NotReadyError(Exception):
    """There is no index yet; the message says what the service is waiting for."""


@dataclass(frozen=True)
class Results:
    """The results of each query, and their provenance."""

    provenance: Provenance
    per_query: Sequence[QueryResult]

    @property
    def partial(self) -> bool:
        """Whether a shard of the index was missing."""
        return any(result.partial for result in self.per_query)


class Retrieval:
    """Searches a source, which is set later and may be replaced. All methods belong to one event loop."""

    def __init__(self, default_topk: int, timeout_s: float, cache_bytes: int = 2**26) -> None:
        self._default_topk = default_topk
        self._timeout_s = timeout_s
        self._source: Source | None = None
        self._is_draining = False
        self._retiring: set[asyncio.Task[None]] = set()
        self._cache: LruCache[tuple[str, SearchOptions, str], QueryResult] = LruCache(cache_bytes)

    @property
    def provenance(self) -> Provenance | None:
        """The provenance of the source; None before there is one."""
        return self._source.provenance if self._source is not None else None

    def set_source(self, source: Source) -> None:
        """Search this source from now on; the previous one finishes its searches and is closed."""
        self._retire()
        self._source = source
        self._cache.clear()

    def drain(self) -> None:
        """From now on no request waits for an index or an encoder that may come: it fails at once."""
        self._is_draining = True

    async def stop(self) -> None:
        """Close the source after its searches."""
        self.drain()
        self._retire()
        self._source = None
        await asyncio.gather(*self._retiring)

    async def retrieve(
        self,
        queries: Sequence[str],
        topk: int = 0,
        filters: Filters = (),
        mode: str = "",
        urgency: Urgency = PATIENT,
    ) -> Results:
        """The best `topk` passages for each query; 0 = the default. A smaller corpus gives fewer.

        Where there is no index yet, or an encoder is down, it waits as long as the caller does: many clients of other
        projects end at their first error. Only a request without queries, a probe, fails at once.

        Args:
            filters: a passage must pass all of them.
            mode: a mode of the index; empty for its default.

        Raises:
            InvalidRequestError: the request exceeds a limit, or its mode or a filter field is unknown.
            NotReadyError: there was no index within the time limit.
            UnavailableError: an encoder was down until the time limit.
            OverloadedError: too many queries are waiting.
            TimeoutError: there was no answer within the time limit.
        """
        _check_request(queries, topk, filters)
        reason: Exception | None = None
        try:
            async with asyncio.timeout(min(self._timeout_s, urgency.timeout_s)):
                while True:
                    try:
                        return await self._retrieve(queries, topk, filters, mode, urgency)
                    except (NotReadyError, UnavailableError) as error:
                        if self._is_draining or not queries:
                            raise
                        reason = error
                    await asyncio.sleep(AGAIN_S)  # wait: within the time limit of the request
        except TimeoutError:
            TIMEOUTS.inc()
            if reason is not None:
                raise reason from None
            raise

    async def _retrieve(
        self, queries: Sequence[str], topk: int, filters: Filters, mode: str, urgency: Urgency
    ) -> Results:
        source = self._get_source()
        before = source.provenance
        options = source.fit_options(SearchOptions(mode or before.mode, topk or self._default_topk, filters))
        if options.topk * len(queries) > MAX_DOCUMENTS:
            raise InvalidRequestError(
                f"{len(queries)} queries of {options.topk} documents are more than {MAX_DOCUMENTS} documents in one"
                " reply: ask for fewer at a time"
            )
        results = {query: self._cache.get((before.index, options, query)) for query in queries}
        missing = [query for query, result in results.items() if result is None]
        provenance = Provenance(before.corpus, before.encoder, before.index, options.mode)
        if missing:
            provenance, searched = await self._search(source, missing, options, urgency)
            if provenance.index != before.index and len(missing) < len(results):
                # A shard changed its index meanwhile: results of both must not be mixed.
                return await self._retrieve(queries, topk, filters, mode, urgency)
            results.update(zip(missing, searched, strict=True))
            if source is self._source:
                self._cache_results(provenance.index, options, missing, searched)
        _MISSES.inc(len(missing))
        _HITS.inc(len(queries) - len(missing))
        return Results(provenance, [result for query in queries if (result := results[query]) is not None])

    async def find_pages(self, urls: Sequence[str]) -> list[dict[str, Any] | None]:
        """For each URL the page of its passages, or None.

        Raises:
            InvalidRequestError: too many URLs, or the index has no filter field `url`.
            NotReadyError: there is no index yet.
        """
        if len(urls) > MAX_URLS:
            raise InvalidRequestError(f"{len(urls)} urls are more than {MAX_URLS} in one request: split it")
        return await self._get_source().find_pages(urls)

    def _get_source(self) -> Source:
        if self._source is None:
            raise NotReadyError("the index is not ready yet")
        return self._source

    async def _search(self, source: Source, queries: Sequence[str], options: SearchOptions, urgency: Urgency) -> Answer:
        attributes: tracing.Attributes = {"forage.queries": len(queries), "forage.mode": options.mode}
        with tracing.span("retriever.index", attributes), waiting("searches", on="index", limit_s=self._timeout_s):
            return await source.search(queries, options, urgency)

    def _cache_results(
        self, index: str, options: SearchOptions, queries: Sequence[str], searched: Sequence[QueryResult]
    ) -> None:
        for query, result in zip(queries, searched, strict=True):
            if result.partial:
                PARTIAL.inc()
            elif len(query) <= MAX_CACHED_CHARS:
                self._cache.put((index, options, query), result, _measure_bytes(query, options, result))

    def _retire(self) -> None:
        if self._source is not None:
            closing = asyncio.create_task(self._source.close())
            self._retiring.add(closing)
            closing.add_done_callback(self._retiring.discard)


def _measure_bytes(query: str, options: SearchOptions, result: QueryResult) -> int:
    """Memory that an entry of the cache keeps, about."""
    filters = sum(sum(map(getsizeof, (field, *values))) for field, values in options.filters)
    return _ENTRY_BYTES + getsizeof(query) + filters + len(result.hits) * _HIT_BYTES + result.own_bytes


def _check_request(queries: Sequence[str], topk: int, filters: Filters) -> None:
    if topk < 0:
        raise InvalidRequestError(f"topk is {topk}: give a positive number, or 0 for the server's default")
    if len(queries) > MAX_QUERIES:
        raise InvalidRequestError(f"{len(queries)} queries are more than {MAX_QUERIES} in one request: split it")
    if (values := sum(len(accepted) for _, accepted in filters)) > MAX_FILTER_VALUES:
        raise InvalidRequestError(
            f"{values} filter values are more than {MAX_FILTER_VALUES} in one request: give fewer"
        )
