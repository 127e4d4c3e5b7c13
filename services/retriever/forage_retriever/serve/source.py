"""What answers searches: the index of this process, or shards in other processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from forage_retriever.corpus.columns import UnknownFieldError
from forage_retriever.hits import Hit, Provenance
from forage_retriever.index.load import Index
from forage_retriever.serve.batcher import Asked, Batcher

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
class Found:
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

    def fit(self, asked: Asked) -> Asked:
        """The same with `topk` no greater than what there is.

        Raises:
            InvalidRequestError: the mode or a filter field is not served here.
        """
        ...

    async def search(self, queries: Sequence[str], asked: Asked) -> tuple[Provenance, Sequence[Found]]:
        """What is found for each query, and what answered."""
        ...

    async def pages(self, urls: Sequence[str]) -> list[dict[str, Any] | None]:
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

    def fit(self, asked: Asked) -> Asked:
        modes = self._index.searchers
        if asked.mode not in modes:
            raise InvalidRequestError(f"mode '{asked.mode}' is not served here: this index has {', '.join(modes)}")
        for field, _ in asked.filters:
            with _refusing():
                self._index.corpus.columns.check(field)
        return asked._replace(topk=min(asked.topk, len(self._index.corpus)))

    async def search(self, queries: Sequence[str], asked: Asked) -> tuple[Provenance, Sequence[Found]]:
        index = self._index
        hits = await self._batcher.search(queries, asked)
        return replace(index.provenance, mode=asked.mode), [Found(index.corpus, found) for found in hits]

    async def pages(self, urls: Sequence[str]) -> list[dict[str, Any] | None]:
        corpus = self._index.corpus
        found: list[dict[str, Any] | None] = []
        for url in urls:
            with _refusing():
                rows = corpus.columns.rows(URL_FIELD, url)
            texts = [corpus.contents[int(row)] for row in rows]
            found.append({"url": url, "contents": "\n".join(texts)} if texts else None)
        return found

    async def close(self) -> None:
        await self._batcher.close()


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except UnknownFieldError as error:
        raise InvalidRequestError(str(error)) from None
