"""Sources of search results: the index of this process, or shards in other processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from forage_retriever.corpus.columns import UnknownFieldError
from forage_retriever.hits import Hit, Provenance
from forage_retriever.index.load import Index
from forage_retriever.serve.batcher import MOST_WAITING, Batcher
from forage_retriever.serve.urgency import Urgency
from forage_retriever.serve.waiting import SearchOptions

URL_FIELD = "url"


class InvalidRequestError(ValueError):
    """A request that cannot be served; the message says why."""


class Passages(Protocol):
    """Passages by row number: whole JSON objects, ids and texts."""

    @property
    def rows(self) -> Sequence[bytes]: ...
    @property
    def ids(self) -> Sequence[str]: ...
    @property
    def contents(self) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The hits of one query, and the passages of their rows.

    Attributes:
        partial: a shard was missing.
        own_bytes: memory of passages that only this result refers to.
    """

    passages: Passages
    hits: Sequence[Hit]
    partial: bool = False
    own_bytes: int = 0


Answer: TypeAlias = tuple[Provenance, Sequence[QueryResult]]
"""The results of each query, and their provenance."""


class Source(Protocol):
    """A searchable source. All methods belong to one event loop."""

    @property
    def provenance(self) -> Provenance:
        """The provenance of results, with the default mode."""
        ...

    def fit_options(self, options: SearchOptions) -> SearchOptions:
        """The same options with `topk` limited to the number of passages.

        Raises:
            InvalidRequestError: the mode or a filter field is unknown.
        """
        ...

    async def search(self, queries: Sequence[str], options: SearchOptions, urgency: Urgency) -> Answer:
        """The results of each query, and their provenance."""
        ...

    async def find_pages(self, urls: Sequence[str]) -> list[dict[str, Any] | None]:
        """For each URL the page of its passages, or None.

        Raises:
            InvalidRequestError: the source cannot find passages by URL.
        """
        ...

    async def close(self) -> None:
        """Finish the running searches and release resources."""
        ...


class LocalSource:
    """An index in this process, searched in batches."""

    def __init__(self, index: Index, max_waiting: int = MOST_WAITING) -> None:
        self._index = index
        self._batcher = Batcher(index.searchers, max_waiting)

    @property
    def provenance(self) -> Provenance:
        return self._index.provenance

    def fit_options(self, options: SearchOptions) -> SearchOptions:
        modes = self._index.searchers
        if options.mode not in modes:
            raise InvalidRequestError(f"mode '{options.mode}' is not served here: this index has {', '.join(modes)}")
        for field, _ in options.filters:
            with _refuse_unknown_field():
                self._index.corpus.columns.check_field(field)
        return options._replace(topk=min(options.topk, len(self._index.corpus)))

    async def search(self, queries: Sequence[str], options: SearchOptions, urgency: Urgency) -> Answer:
        index = self._index
        hits = await self._batcher.search(queries, options, urgency)
        return replace(index.provenance, mode=options.mode), [QueryResult(index.corpus, own) for own in hits]

    async def find_pages(self, urls: Sequence[str]) -> list[dict[str, Any] | None]:
        corpus = self._index.corpus
        pages: list[dict[str, Any] | None] = []
        for url in urls:
            with _refuse_unknown_field():
                rows = corpus.columns.find_rows(URL_FIELD, url)
            texts = [corpus.contents[int(row)] for row in rows]
            pages.append({"url": url, "contents": "\n".join(texts)} if texts else None)
        return pages

    async def close(self) -> None:
        await self._batcher.close()


@contextmanager
def _refuse_unknown_field() -> Iterator[None]:
    try:
        yield
    except UnknownFieldError as error:
        raise InvalidRequestError(str(error)) from None
