"""The requests that wait for the search thread, in the order in which they are due, and the batches made of them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from forage_retriever.hits import Filters
from forage_retriever.serve.urgency import Urgency, compute_due

MAX_BATCH = 64
MAX_BATCH_TOKENS = 2048
"""Estimated; a batch of long queries has fewer of them."""

TURN_QUERIES = 32
"""Queries of one request that are taken before it is due again as if it had just arrived."""

CHARS_PER_TOKEN = 4
MAX_QUERY_TOKENS = 256
"""Approximate limit of encoders, beyond which a query costs no more."""


class SearchOptions(NamedTuple):
    """Options of a search; only queries with equal options share a batch.

    A shared batch must not change results: `topk`, for example, decides how deep rankings are read.
    """

    mode: str
    topk: int
    filters: Filters = ()


class QueuedSearch:
    """The queries of one caller, and how many of them are taken."""

    __slots__ = ("due", "options", "taken", "texts", "turn", "urgency")

    def __init__(self, texts: Sequence[str], options: SearchOptions, urgency: Urgency) -> None:
        self.texts = texts
        self.options = options
        self.urgency = urgency
        self.due = (0.0, 0)
        self.taken = 0
        self.turn = 0

    @property
    def untaken(self) -> int:
        """Queries that are in no batch yet."""
        return len(self.texts) - self.taken


R = TypeVar("R", bound=QueuedSearch)


class WaitingRequests(Generic[R]):
    """Takes batches of the requests that are due first. Not thread-safe."""

    def __init__(self) -> None:
        self._all: list[tuple[tuple[float, int], R]] = []
        self._alike: dict[SearchOptions, list[tuple[tuple[float, int], R]]] = {}
        self._numbers = itertools.count()
        self.queries = 0

    def add(self, request: R, now: float) -> None:
        """Let a request wait from `now`, in seconds of any clock that does not go back."""
        self.queries += request.untaken
        self._push(request, now)

    def withdraw(self, request: R) -> None:
        """Take no more queries of a request."""
        self.queries -= request.untaken
        request.taken = len(request.texts)
        self._forget_if_empty()

    def take_batch(self, now: float) -> tuple[SearchOptions, list[tuple[R, int]]]:
        """The next batch: the request that is due first and, in the order in which they are due, those like it.

        A request of more than `TURN_QUERIES` queries is then due again as if it came `now`. Queries must wait.

        Returns:
            The options of all of them, and each query as its request and its place there.
        """
        first = _peek(self._all)
        assert first is not None
        batch = self._fill_batch(self._alike[first.options], now)
        self.queries -= len(batch)
        self._forget_if_empty()
        return first.options, batch

    def _fill_batch(self, alike: list[tuple[tuple[float, int], R]], now: float) -> list[tuple[R, int]]:
        batch: list[tuple[R, int]] = []
        tokens = 0
        while (request := _peek(alike)) is not None:
            while request.untaken and request.turn < TURN_QUERIES:
                cost = min(len(request.texts[request.taken]) // CHARS_PER_TOKEN + 2, MAX_QUERY_TOKENS)
                if batch and (len(batch) == MAX_BATCH or tokens + cost > MAX_BATCH_TOKENS):
                    return batch
                batch.append((request, request.taken))
                tokens += cost
                request.taken += 1
                request.turn += 1
            request.turn = 0
            if request.untaken:
                self._push(request, now)
        return batch

    def _push(self, request: R, now: float) -> None:
        request.due = (compute_due(request.urgency, now), next(self._numbers))
        for heap in (self._all, self._alike.setdefault(request.options, [])):
            heapq.heappush(heap, (request.due, request))

    def _forget_if_empty(self) -> None:
        if not self.queries:
            self._all.clear()
            self._alike.clear()


def _peek(heap: list[tuple[tuple[float, int], R]]) -> R | None:
    """The request that is due first; entries of requests that are taken, or due again later, are dropped."""
    while heap:
        due, request = heap[0]
        if request.untaken and request.due == due:
            return request
        heapq.heappop(heap)
    return None
