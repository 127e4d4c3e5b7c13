"""Dynamic batching: what waits when the search thread is free is searched together, and no request holds up the others.

The thread takes each batch itself, so it never waits for the event loop: while it searches, the next batch gathers, and
a query that comes when nothing is searched goes out at once. A batch holds queries that want the same, up to a number
of queries and an estimate of tokens; requests with more than a turn's worth of queries go to the back after each turn.
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
from forage_retriever.hits import Filters, Hit, Searcher

MAX_BATCH = 64
MAX_BATCH_TOKENS = 2048
"""Estimated; a batch of long queries is a smaller one."""

TURN_QUERIES = 32
"""Queries of one request that are taken before it goes to the back of its queue."""

CHARS_PER_TOKEN = 4
MAX_QUERY_TOKENS = 256
"""At which encoders cut, more or less."""

SEARCH_THREAD = "search"

BATCH = Histogram(
    "forage_retriever_batch_queries", "Queries searched together, without repetitions", buckets=(1, 2, 4, 8, 16, 32, 64)
)
SECONDS = Histogram("forage_retriever_search_seconds", "Time to search a batch")
WAITING = Gauge("forage_retriever_waiting_queries", "Queries in the queue")
SHED = Counter("forage_retriever_shed_queries_total", "Queries turned away because the queue was full")
FAILURES = Counter("forage_retriever_search_failures_total", "Searches that raised")


class OverloadedError(Exception):
    """The queue is full: come back later."""


class SearchOptions(NamedTuple):
    """How queries are to be searched; those that ask the same share a batch.

    What is wanted of one query never changes another's answer: how deep a ranking is read depends on `topk`.
    """

    mode: str
    topk: int
    filters: Filters = ()


class _Request:
    """The queries of one caller: how many are taken, and what was found."""

    __slots__ = ("found", "left", "result", "taken", "texts", "turn")

    def __init__(self, texts: Sequence[str], result: asyncio.Future[list[list[Hit]]]) -> None:
        self.texts = texts
        self.result = result
        self.taken = 0
        self.turn = 0
        self.found: list[list[Hit]] = [[] for _ in texts]
        self.left = len(texts)


_Batch: TypeAlias = list[tuple[_Request, int]]


class Batcher:
    """Searches for any number of concurrent callers on one event loop."""

    def __init__(self, searchers: Mapping[str, Searcher], max_waiting: int) -> None:
        """Start the search thread; must be called on the event loop.

        Args:
            searchers: by mode.
            max_waiting: queries in the queue, beyond which requests are turned away rather than made to wait.
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
        """The hits of each query. A caller that is cancelled takes its queries with it.

        Raises:
            OverloadedError: there is no room for all of them in the queue.
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
        """Search what is waiting, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        await self._ended.wait()

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
        """The next batch, waiting for one; None when closed and nothing waits."""
        with self._changed:
            while not self._waiting:
                self._queues.clear()  # of requests that were given up
                if self._closed:
                    return None
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
        """Take from the front of a queue, where a request that the batch cuts short stays with the rest of its turn."""
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
                found = self._searchers[options.mode].search(texts, options.topk, options.filters)
        except Exception as error:  # noqa: BLE001 - what a search library raises belongs to the caller, not the thread
            FAILURES.inc()
            if len(texts) == 1 or isinstance(error, UnavailableError):
                self._loop.call_soon_threadsafe(_fail, batch, error)
                return
            for text in texts:  # one bad query must not cost its neighbours their results
                self._search(options, [(request, place) for request, place in batch if request.texts[place] == text])
            return
        self._loop.call_soon_threadsafe(_deliver, batch, dict(zip(texts, found, strict=True)))


def _deliver(batch: _Batch, hits: Mapping[str, list[Hit]]) -> None:
    for request, place in batch:
        request.found[place] = hits[request.texts[place]]
        request.left -= 1
        if not request.left and not request.result.done():
            request.result.set_result(request.found)


def _fail(batch: _Batch, error: Exception) -> None:
    for request, _ in batch:
        if not request.result.done():
            request.result.set_exception(error)
