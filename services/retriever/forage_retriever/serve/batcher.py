"""Dynamic batching: queries that wait when the search thread is free are searched together, fairly across requests.

The thread takes each batch itself, so it never waits for the event loop: while it searches, the next batch fills, and a
query that arrives when the thread is idle is searched at once. A batch holds queries with the same options, up to a
number of queries and of estimated tokens; a request with more than `TURN_QUERIES` queries goes to the back after each
turn, so that large requests do not delay small ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from prometheus_client import Counter, Gauge, Histogram

from forage_common.errors import UnavailableError
from forage_common.telemetry.waits import idling
from forage_retriever.hits import Filters, Hit, Searcher

MAX_BATCH = 64
MAX_BATCH_TOKENS = 2048
"""Estimated; a batch of long queries has fewer of them."""

TURN_QUERIES = 32
"""Queries of one request that are taken before it moves to the back of its queue."""

CHARS_PER_TOKEN = 4
MAX_QUERY_TOKENS = 256
"""Approximate limit of encoders, beyond which a query costs no more."""

SEARCH_THREAD = "search"

BATCH = Histogram(
    "forage_retriever_batch_queries", "Queries searched together, without repetitions", buckets=(1, 2, 4, 8, 16, 32, 64)
)
SECONDS = Histogram("forage_retriever_search_seconds", "Time to search a batch")
WAITING = Gauge("forage_retriever_waiting_queries", "Queries in the queue")
SHED = Counter("forage_retriever_shed_queries_total", "Queries rejected because the queue was full")
FAILURES = Counter("forage_retriever_search_failures_total", "Searches that raised")


class OverloadedError(Exception):
    """The queue is full: retry later."""


class SearchOptions(NamedTuple):
    """Options of a search; only queries with equal options share a batch.

    A shared batch must not change results: `topk`, for example, decides how deep rankings are read.
    """

    mode: str
    topk: int
    filters: Filters = ()


class _Request:
    """The queries of one caller: how many are taken, and their results."""

    __slots__ = ("hits", "missing", "result", "taken", "texts", "turn")

    def __init__(self, texts: Sequence[str], result: asyncio.Future[list[list[Hit]]]) -> None:
        self.texts = texts
        self.result = result
        self.taken = 0
        self.turn = 0
        self.hits: list[list[Hit]] = [[] for _ in texts]
        self.missing = len(texts)


_Batch: TypeAlias = list[tuple[_Request, int]]


class Batcher:
    """Searches for any number of concurrent callers on one event loop."""

    def __init__(self, searchers: Mapping[str, Searcher], max_waiting: int) -> None:
        """Start the search thread; must be called on the event loop.

        Args:
            searchers: by mode.
            max_waiting: limit of queries in the queue, beyond which requests are rejected.
        """
        self._searchers = searchers
        self._max_waiting = max_waiting
        self._queues: dict[SearchOptions, deque[_Request]] = {}
        self._waiting = 0
        self._closed = False
        self._changed = threading.Condition()
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        threading.Thread(target=self._run, name=SEARCH_THREAD, daemon=True).start()

    async def search(self, queries: Sequence[str], options: SearchOptions) -> list[list[Hit]]:
        """The hits of each query. Cancelling the call removes its queries from the queue.

        Raises:
            OverloadedError: the queue has no room for all of them.
        """
        request = _Request(queries, self._loop.create_future())
        with self._changed:
            if self._waiting + len(queries) > self._max_waiting:
                SHED.inc(len(queries))
                raise OverloadedError(f"{self._waiting} queries are waiting already")
            self._queues.setdefault(options, deque()).append(request)
            self._waiting += len(queries)
            WAITING.set(self._waiting)
            self._changed.notify()
        try:
            return await request.result
        finally:
            self._withdraw(request)

    async def close(self) -> None:
        """Search the waiting queries, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        await self._ended.wait()  # wait: the last batch, whose searches have time limits

    def _withdraw(self, request: _Request) -> None:
        with self._changed:
            self._waiting -= len(request.texts) - request.taken
            request.taken = len(request.texts)
            WAITING.set(self._waiting)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            while (taken := self._take_batch()) is not None:
                self._search(*taken)
            self._loop.call_soon_threadsafe(self._ended.set)

    def _take_batch(self) -> tuple[SearchOptions, _Batch] | None:
        """Wait for the next batch; None when closed and nothing waits."""
        with self._changed:
            while not self._waiting:
                self._queues.clear()  # of cancelled requests
                if self._closed:
                    return None
                with idling("searches", on="rollout"):
                    self._changed.wait()
            options = next(iter(self._queues))
            queue = self._queues.pop(options)
            batch = self._fill_batch(queue)
            if queue:
                self._queues[options] = queue  # behind the other queues
            self._waiting -= len(batch)
            WAITING.set(self._waiting)
            return options, batch

    @staticmethod
    def _fill_batch(queue: deque[_Request]) -> _Batch:
        """Take a batch from the front of a queue; a request that does not fit whole stays in front."""
        batch: _Batch = []
        tokens = 0
        while queue:
            request = queue[0]
            while request.taken < len(request.texts) and request.turn < TURN_QUERIES:
                cost = min(len(request.texts[request.taken]) // CHARS_PER_TOKEN + 2, MAX_QUERY_TOKENS)
                if batch and (len(batch) == MAX_BATCH or tokens + cost > MAX_BATCH_TOKENS):
                    return batch
                batch.append((request, request.taken))
                tokens += cost
                request.taken += 1
                request.turn += 1
            request.turn = 0
            queue.popleft()
            if request.taken < len(request.texts):
                queue.append(request)
        return batch

    def _search(self, options: SearchOptions, batch: _Batch) -> None:
        texts = list(dict.fromkeys(request.texts[place] for request, place in batch))
        if not texts:
            return
        BATCH.observe(len(texts))
        try:
            with SECONDS.time():
                hits = self._searchers[options.mode].search(texts, options.topk, options.filters)
        except Exception as error:  # noqa: BLE001 - an error of a search library is the caller's; the thread must survive it
            FAILURES.inc()
            if len(texts) == 1 or isinstance(error, UnavailableError):
                self._loop.call_soon_threadsafe(_fail, batch, error)
                return
            for text in texts:  # one bad query must not cost its neighbours their results
                self._search(options, [(request, place) for request, place in batch if request.texts[place] == text])
            return
        self._loop.call_soon_threadsafe(_deliver, batch, dict(zip(texts, hits, strict=True)))


def _deliver(batch: _Batch, hits: Mapping[str, list[Hit]]) -> None:
    for request, place in batch:
        request.hits[place] = hits[request.texts[place]]
        request.missing -= 1
        if not request.missing and not request.result.done():
            request.result.set_result(request.hits)


def _fail(batch: _Batch, error: Exception) -> None:
    for request, _ in batch:
        if not request.result.done():
            request.result.set_exception(error)
