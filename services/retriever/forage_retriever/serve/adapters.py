"""The JSON bodies of search agents' clients, each with the reply that they expect: docs/guide/serve-retrieval.md."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from forage_retriever.corpus import columns
from forage_retriever.hits import Filters
from forage_retriever.serve.retrieval import MAX_QUERIES, Results
from forage_retriever.serve.source import QueryResult
from forage_retriever.serve.urgency import Urgency

Value = str | bool | int | float
Count = Annotated[
    int | None,
    Field(
        description="documents per query; absent, null or 0 = `retriever.topk`; more than there are passages = all of"
        " them, each once"
    ),
]
Queries = Annotated[
    list[str],
    Field(
        description=f"at most {MAX_QUERIES}; for a blank one dense and hybrid search give what is nearest to the empty"
        " text, bm25 and title nothing"
    ),
]
WithScores = Annotated[bool, Field(description="pair each document with its score")]


class Body(BaseModel):
    """A request body, read as other servers read it: unknown fields are ignored, and "3" or 3.0 is a number."""

    example: ClassVar[str]


class Search(Body, ABC):
    """A body that asks for documents."""

    filters: dict[str, Value | list[Value]] | None = Field(
        None, description="field of `retriever.filter_fields` → its value, or a list of values; all fields must match"
    )
    mode: str | None = Field(
        None, description="bm25, dense, hybrid or title (the query is the title); absent or null = the index's own"
    )

    context_tokens: int = Field(
        0, ge=0, le=2**32 - 1, description="length of the trajectory that waits; long ones are searched first"
    )
    timeout_s: float | None = Field(
        None, gt=0, description="seconds after which the caller gives up; absent or null = 300"
    )

    @property
    @abstractmethod
    def texts(self) -> Sequence[str]:
        """The queries."""

    @property
    @abstractmethod
    def limit(self) -> int:
        """Documents per query; 0 = the server's default."""

    @property
    def conditions(self) -> Filters:
        """The filters in canonical form."""
        return normalize_filters(self.filters or {})

    @property
    def urgency(self) -> Urgency:
        """How soon the caller needs the reply."""
        return Urgency(self.context_tokens, math.inf if self.timeout_s is None else self.timeout_s)

    @abstractmethod
    def build_reply(self, results: Results) -> bytes:
        """The reply, in JSON."""


class RetrieveRequest(Search):
    """Queries, as Search-R1 sends them."""

    example = '{"queries": [text, …], "topk": number, "return_scores": true or false}'
    queries: Queries
    topk: Count = None
    return_scores: WithScores = False

    @property
    def texts(self) -> Sequence[str]:
        return self.queries

    @property
    def limit(self) -> int:
        return self.topk or 0

    def build_reply(self, results: Results) -> bytes:
        return _encode_result(results, self.return_scores)


class QueryRequest(Search):
    """One query: as SkyRL sends it, or with `top_k` or `k` as rLLM does."""

    example = '{"query": text, "topk": number, "return_scores": true or false}'
    query: str
    topk: Count = None
    top_k: Count = None
    k: Count = None
    return_scores: WithScores = False

    @property
    def texts(self) -> Sequence[str]:
        return [self.query]

    @property
    def limit(self) -> int:
        return self.topk or self.top_k or self.k or 0

    def build_reply(self, results: Results) -> bytes:
        if self.top_k is None and self.k is None:
            return _encode_result(results, self.return_scores)
        (result,) = results.per_query
        head = json.dumps({"query": self.query, "method": results.provenance.mode, "num_results": len(result.hits)})
        return b'%b,"results":%b%b}' % (head[:-1].encode(), _encode_documents(result, True), _encode_partial(results))


class QueriesRequest(Search):
    """Queries, as R1-Searcher sends them."""

    example = '{"queries": [text, …], "k": number}'
    queries: Queries
    k: Count = None

    @property
    def texts(self) -> Sequence[str]:
        return self.queries

    @property
    def limit(self) -> int:
        return self.k or 0

    def build_reply(self, results: Results) -> bytes:
        # An answer is a line of R1-Searcher's corpus file: its clients strip the leading number.
        answers = [
            [f"{hit.row}\t{result.passages.contents[hit.row]}" for hit in result.hits] for result in results.per_query
        ]
        head = json.dumps({"queries": self.queries, "answers": answers}, ensure_ascii=False)
        return b"%b%b}" % (head[:-1].encode(), _encode_partial(results))


class AccessRequest(Body):
    """URLs of pages, as ASearcher sends them."""

    example = '{"urls": [text, …]}'
    urls: list[str]


class Scored(BaseModel):
    """A document with its score; higher is better."""

    document: dict[str, Any]
    score: float


class Reply(BaseModel):
    """The field that every reply to a search may have."""

    partial: bool = Field(False, description="true where a shard of the index was missing; absent otherwise")


class RetrieveReply(Reply):
    """For each query its documents, best first: whole corpus rows, with scores only if requested."""

    result: list[list[Scored | dict[str, Any]]]


class QueryReply(Reply):
    """The reply for rLLM's clients."""

    query: str
    method: str
    num_results: int
    results: list[Scored]


class QueriesReply(Reply):
    """The reply for R1-Searcher's clients: number, tab and text of each passage."""

    queries: list[str]
    answers: list[list[str]]


class Page(BaseModel):
    """The passages of one URL, joined in the order of the corpus."""

    url: str
    contents: str


class AccessReply(BaseModel):
    """The reply for ASearcher's clients: a page for each URL, null where there is none."""

    result: list[Page | None]


def normalize_filters(by_field: Mapping[str, Any]) -> Filters:
    """Filters in canonical form, from field → value or values."""
    return tuple(
        sorted((field, tuple(sorted(columns.extract_values(value, field)))) for field, value in by_field.items())
    )


def _encode_result(results: Results, with_scores: bool) -> bytes:
    lists = b",".join([_encode_documents(result, with_scores) for result in results.per_query])
    return b'{"result":[%b]%b}' % (lists, _encode_partial(results))


def _encode_documents(result: QueryResult, with_scores: bool) -> bytes:
    # Rows are JSON already: inserting them unchanged avoids decoding and encoding every document.
    rows = result.passages.rows
    if with_scores:
        return b"[%b]" % b",".join(
            [b'{"document":%b,"score":%b}' % (rows[hit.row], repr(hit.score).encode()) for hit in result.hits]
        )
    return b"[%b]" % b",".join([rows[hit.row] for hit in result.hits])


def _encode_partial(results: Results) -> bytes:
    return b',"partial":true' if results.partial else b""
