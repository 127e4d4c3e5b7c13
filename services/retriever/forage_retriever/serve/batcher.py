"""Dynamic batching: queries that wait when the search thread is free are searched together, in the order of `urgency`.

The thread takes each batch itself, so it never waits for the event loop: while it searches, the next batch fills, and a
query that arrives when the thread is idle is searched at once: a batch is never held back to become full. A batch holds
queries with the same options, up to a number of queries and of estimated tokens; a request with more than
`TURN_QUERIES` queries is due again after each turn, so that large requests do not delay small ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from prometheus_client import Counter, Gauge, Histogram

from forage_retriever.hits import Hit, Searcher
from forage_retriever.serve.urgency import PATIENT, Urgency
from forage_retriever.serve.waiting import QueuedSearch, SearchOptions, WaitingRequests
from forage_runtime.errors import UnavailableError
from forage_runtime.telemetry.waits import idling

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


class _Search(QueuedSearch):
    """A request whose caller waits for the result."""

    __slots__ = ("hits", "missing", "result")

    def __init__(
        self,
        texts: Sequence[str],
        options: SearchOptions,
        urgency: Urgency,
        result: asyncio.Future[list[list[Hit]]],
    ) -> None:
        super().__init__(texts, options, urgency)
        self.result = result
        self.hits: list[list[Hit]] = [[] for _ in texts]
        self.missing = len(texts)


_Batch: TypeAlias = list[tuple[_Search, int]]


MOST_WAITING = 65_536
"""Queries of a service; further requests get 503 with Retry-After."""


class Batcher:
    """Searches for any number of concurrent callers on one event loop."""

    def __init__(self, searchers: Mapping[str, Searcher], max_waiting: int) -> None:
        """Start the search thread; must be called on the event loop.

        Args:
            searchers: by mode.
            max_waiting: limit of queries in the queue, beyond which requests are rejected; a request alone may be
                larger.
        """
        self._searchers = searchers
        self._max_waiting = max_waiting
        self._requests: WaitingRequests[_Search] = WaitingRequests()
        self._closed = False
        self._changed = threading.Condition()
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        threading.Thread(target=self._run, name=SEARCH_THREAD, daemon=True).start()

    async def search(
        self, queries: Sequence[str], options: SearchOptions, urgency: Urgency = PATIENT
    ) -> list[list[Hit]]:
        """The hits of each query. Cancelling the call removes its queries from the queue.

        Raises:
            OverloadedError: others wait, and there is no room for all of these.
        """
        request = _Search(queries, options, urgency, self._loop.create_future())
        with self._changed:
            waiting = self._requests.queries
            if waiting and waiting + len(queries) > self._max_waiting:
                SHED.inc(len(queries))
                raise OverloadedError(f"{waiting} queries are waiting already")
            self._requests.add(request, time.monotonic())
            WAITING.set(self._requests.queries)
            self._changed.notify()
        try:
            return await request.result
        finally:
            with self._changed:
                self._requests.withdraw(request)
                WAITING.set(self._requests.queries)

    async def close(self) -> None:
        """Search the waiting queries, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        await self._ended.wait()  # wait: the last batch, whose searches have time limits

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            while (taken := self._take_batch()) is not None:
                self._search(*taken)
            self._loop.call_soon_threadsafe(self._ended.set)

    def _take_batch(self) -> tuple[SearchOptions, _Batch] | None:
        """Wait for the next batch; None when closed and nothing waits."""
        with self._changed:
            while not self._requests.queries:
                if self._closed:
                    return None
                with idling("searches", on="rollout"):
                    self._changed.wait()
            taken = self._requests.take_batch(time.monotonic())
            WAITING.set(self._requests.queries)
            return taken

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
