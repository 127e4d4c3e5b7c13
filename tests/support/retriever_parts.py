"""Parts of the retriever for its tests, in this process."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from forage_retriever.corpus.read import Passage
from forage_retriever.corpus.store import Corpus, CorpusWriter
from forage_retriever.hits import Filters, Hit, Searcher
from forage_retriever.index.load import Index
from forage_retriever.serve.retrieval import Results, Retrieval
from forage_retriever.serve.source import LocalSource
from forage_runtime.errors import UnavailableError

DEFAULT_TOPK = 3
LONG_S = 300.0
"""Limit of what must not end by its limit."""


class Recorder:
    """Wraps a searcher, records its calls, and can be blocked."""

    def __init__(self, inner: Searcher) -> None:
        self.inner = inner
        self.asked: list[tuple[list[str], int]] = []
        self.down = 0  # searches that fail before one succeeds
        self.open = threading.Event()
        self.open.set()
        self.busy = threading.Event()
        self.current: list[str] = []  # queries of the search that began last

    def search(self, queries: Sequence[str], topk: int, filters: Filters = ()) -> list[list[Hit]]:
        self.current = list(queries)
        self.busy.set()
        assert self.open.wait(120)
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
async def open_retrieval(index: Index, timeout_s: float = LONG_S, max_waiting: int = 8192) -> AsyncIterator[Retrieval]:
    """A retrieval over an index."""
    core = Retrieval(DEFAULT_TOPK, timeout_s)
    core.set_source(LocalSource(index, max_waiting))
    try:
        yield core
    finally:
        await core.stop()


def list_ids(results: Results) -> list[list[str]]:
    """The ids that were found, by query."""
    return [[result.passages.ids[hit.row] for hit in result.hits] for result in results.per_query]
