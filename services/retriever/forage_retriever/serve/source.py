"""What answers searches: the index of this process, or shards in other processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from forage_retriever.corpus.columns import UnknownFieldError
from forage_retriever.hits import Hit, Provenance
from forage_retriever.index.load import Index
from forage_retriever.serve.batcher import Batcher, SearchOptions

URL_FIELD = "url"


class InvalidRequestError(ValueError):
    """A request that cannot be served; the message says why."""


class Passages(Protocol):
    """Passages by row number: the whole JSON object, the id, the text."""

    @property
    def rows(self) -> Sequence[bytes]: ...
    @property
    def ids(self) -> Sequence[str]: ...
    @property
    def contents(self) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class QueryResult:
    """Hits of one query, and the passages that they are rows of; `partial` where a shard was missing."""

    passages: Passages
    hits: Sequence[Hit]
    partial: bool = False


class Source(Protocol):
    """Something that can be searched. All methods belong to one event loop."""

    @property
    def provenance(self) -> Provenance:
        """What answers, and the mode of a request that names none."""
        ...

    def fit_options(self, options: SearchOptions) -> SearchOptions:
        """The same with `topk` no greater than what there is.

        Raises:
            InvalidRequestError: the mode or a filter field is not served here.
        """
        ...

    async def search(self, queries: Sequence[str], options: SearchOptions) -> tuple[Provenance, Sequence[QueryResult]]:
        """What is found for each query, and what answered."""
        ...

    async def find_pages(self, urls: Sequence[str]) -> list[dict[str, Any] | None]:
        """For each address the page that its passages make, or None.

        Raises:
            InvalidRequestError: passages cannot be found by address here.
        """
        ...

    async def close(self) -> None:
        """Finish the searches in hand and let go of what is held."""
        ...


class LocalSource:
    """An index in this process, searched in batches."""

    def __init__(self, index: Index, max_waiting: int) -> None:
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

    async def search(self, queries: Sequence[str], options: SearchOptions) -> tuple[Provenance, Sequence[QueryResult]]:
        index = self._index
        hits = await self._batcher.search(queries, options)
        return replace(index.provenance, mode=options.mode), [QueryResult(index.corpus, found) for found in hits]

    async def find_pages(self, urls: Sequence[str]) -> list[dict[str, Any] | None]:
        corpus = self._index.corpus
        found: list[dict[str, Any] | None] = []
        for url in urls:
            with _refuse_unknown_field():
                rows = corpus.columns.find_rows(URL_FIELD, url)
            texts = [corpus.contents[int(row)] for row in rows]
            found.append({"url": url, "contents": "\n".join(texts)} if texts else None)
        return found

    async def close(self) -> None:
        await self._batcher.close()


@contextmanager
def _refuse_unknown_field() -> Iterator[None]:
    try:
        yield
    except UnknownFieldError as error:
        raise InvalidRequestError(str(error)) from None
