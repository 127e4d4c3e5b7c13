"""The asynchronous client of the retriever: `POST /retrieve` on kept-alive connections.

Searches that begin in the same turn of the event loop and ask for the same go in one request: with thousands of
trajectories in a process the requests, not the queries, are what searches cost it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import httpx

from forage_proto.v1.trajectory_pb2 import Document, Provenance
from forage_runtime.clients.calls import MalformedReplyError, RefusedError, call
from forage_runtime.clients.circuit import Circuit
from forage_runtime.clients.concurrency import Slots
from forage_runtime.clients.lanes import Lanes
from forage_runtime.clients.outgoing import bound_replies
from forage_runtime.errors import UnavailableError
from forage_runtime.security.tls import http_scheme, make_client_context
from forage_runtime.security.token_file import HEADER, TokenFile, open_token_file
from forage_runtime.settings import Settings, TlsSettings
from forage_runtime.telemetry import tracing

CONNECT_S = 5.0
TOKEN_SETTING = "retriever.auth_token_file"
_OFF = TlsSettings()
MAX_CONNECTIONS = 256
"""As many as trajectories that a rollout replica runs by its defaults: what waits here is in no order of urgency."""

KEEP_ALIVE_S = 60.0
"""Of an idle connection: longer than most steps of a training, and shorter than the retriever keeps it.

With httpx's own 5 s connections would end between two steps, and each step begin with handshakes.
"""

MERGED = 16
"""Searches in one request; all of them wait for the slowest."""

SPARE_S = 1.0
"""Of the limit of a search: the retriever gives up this much earlier, so that its reason still arrives."""

_context_tokens: ContextVar[int] = ContextVar("context_tokens", default=0)


@contextmanager
def searching_for(context_tokens: int) -> Iterator[None]:
    """Within the block, searches say how long the trajectory is that waits for them, in tokens.

    The retriever answers long ones first. Environments need not know: it goes with whatever they search.
    """
    token = _context_tokens.set(context_tokens)
    try:
        yield
    finally:
        _context_tokens.reset(token)


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        documents: one list per query, best first.
        provenance: digests of the index that answered; empty if the server does not send them.
        partial: whether a shard of the index was missing.
    """

    documents: list[list[Document]]
    provenance: Provenance
    partial: bool


@dataclass(frozen=True)
class _Search:
    """A search of one query that waits to be sent.

    Attributes:
        query: its text.
        context_tokens: as of `searching_for`.
        found: its result, or error; cancelled: nobody waits for it any more.
    """

    query: str
    context_tokens: int
    found: asyncio.Future[SearchResult]


class RetrieverClient:
    """Searches at one address. Close it, or use it as a context manager, to close its connections.

    Example:
        async with RetrieverClient("127.0.0.1:18610") as retriever:
            result = await retriever.search(["capital of Mongolia"], topk=3)
    """

    def __init__(
        self, address: str, timeout_s: float = 30.0, *, tls: TlsSettings = _OFF, tokens: TokenFile | None = None
    ) -> None:
        """Connect on the first search.

        Args:
            address: host:port.
            timeout_s: limit of one search with all its attempts.
            tls: certificates of all wires.
            tokens: the first of them is sent.

        Raises:
            SettingsError: a file of the certificates is wrong.
        """
        self._timeout_s = timeout_s
        self._tokens = tokens
        self._circuit = Circuit("retriever", address)
        url, context = f"{http_scheme(tls)}://{address}", make_client_context(tls)
        limits = httpx.Limits(max_connections=1, keepalive_expiry=KEEP_ALIVE_S)

        def connect() -> httpx.AsyncClient:
            return httpx.AsyncClient(
                base_url=url,
                timeout=httpx.Timeout(None, connect=CONNECT_S),  # `call` sets the deadline
                **bound_replies(verify=context, limits=limits),
            )

        self._lanes, self._slots = Lanes(connect), Slots("retriever", MAX_CONNECTIONS)
        self._begun: dict[str, list[_Search]] = {}  # options → those that begin in this turn of the event loop
        self._sending: set[asyncio.Task[None]] = set()

    @classmethod
    def from_settings(cls, settings: Settings, timeout_s: float = 30.0) -> RetrieverClient:
        """Make the client of the retriever that the settings name.

        Raises:
            SettingsError: a file of the certificates or of the token is wrong.
        """
        own = settings.retriever
        tokens = open_token_file(own.auth_token_file, TOKEN_SETTING)
        return cls(own.http_address, timeout_s, tls=settings.tls, tokens=tokens)

    async def search(
        self,
        queries: Sequence[str],
        topk: int = 0,
        filters: Mapping[str, str | Sequence[str]] | None = None,
        mode: str = "",
    ) -> SearchResult:
        """Search for documents.

        Args:
            queries: texts.
            topk: documents per query; 0: the server's default.
            filters: field → the value, or values, of which a passage must have one.
            mode: bm25, dense or hybrid; empty: the server's default.

        Raises:
            UnavailableError: no answer within the deadline.
            RefusedError: the retriever rejects the search; the message has the reason.
            MalformedReplyError: the reply does not follow the wire format.
        """
        chosen = {"topk": topk, "filters": filters, "mode": mode}
        options = {name: value for name, value in chosen.items() if value}
        context_tokens = _context_tokens.get()
        attributes: tracing.Attributes = {"server.address": self._circuit.address, "forage.queries": len(queries)}
        with tracing.span("retriever.search", attributes, kind=tracing.SpanKind.CLIENT):
            headers = tracing.trace_headers()
            if headers or len(queries) != 1:  # a request belongs to one trace
                return await self._send(list(queries), options, context_tokens, headers)
            search = _Search(queries[0], context_tokens, asyncio.get_running_loop().create_future())
            self._begin(search, options)
            return await search.found  # wait: `_send` has a time limit

    async def close(self) -> None:
        """End the searches in progress, and close the connections."""
        for search in chain(*self._begun.values()):
            search.found.cancel()
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        await self._lanes.close()

    async def __aenter__(self) -> RetrieverClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _begin(self, search: _Search, options: Mapping[str, Any]) -> None:
        """Send a search with those that begin before the event loop turns."""
        key = json.dumps(options, sort_keys=True)  # as they are now: the caller may change its filters meanwhile
        begun = self._begun.setdefault(key, [])
        if not begun:
            asyncio.get_running_loop().call_soon(self._merge, key)
        begun.append(search)

    def _merge(self, key: str) -> None:
        options = json.loads(key)
        begun = [search for search in self._begun.pop(key) if not search.found.done()]
        # The retriever answers requests of long trajectories first: they are not held up by short ones.
        begun.sort(key=lambda one: one.context_tokens, reverse=True)
        for first in range(0, len(begun), MERGED):
            searches = begun[first : first + MERGED]
            task = asyncio.create_task(self._answer(searches, options))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
            task.add_done_callback(partial(_cancel, searches))
            for search in searches:
                search.found.add_done_callback(partial(_cancel_unwanted, task, searches))

    async def _answer(self, searches: Sequence[_Search], options: Mapping[str, Any]) -> None:
        """Send searches in one request, and give each its result."""
        try:
            queries, longest = [one.query for one in searches], max(one.context_tokens for one in searches)
            result = await self._send(queries, options, longest, {})
        except UnavailableError as error:
            _fail(searches, error)
        except Exception as error:  # noqa: BLE001 - who waits raises it
            if len(searches) > 1:  # one of them is at fault: it is refused, cannot be sent, or finds what is malformed
                await asyncio.gather(*(self._answer([one], options) for one in searches))
            else:
                _fail(searches, error)
        else:
            for search, documents in zip(searches, result.documents, strict=True):
                if not search.found.done():
                    search.found.set_result(SearchResult([documents], result.provenance, result.partial))

    async def _send(
        self, queries: list[str], options: Mapping[str, Any], context_tokens: int, headers: dict[str, str]
    ) -> SearchResult:
        body: dict[str, Any] = {"queries": queries, "return_scores": True, **options}
        if context_tokens:
            body["context_tokens"] = context_tokens

        async def attempt(left_s: float) -> httpx.Response:
            with self._lanes.take() as http:
                body["timeout_s"] = round(max(left_s - SPARE_S, left_s / 2, 0.01), 3)
                if self._tokens is not None:
                    headers[HEADER] = f"Bearer {self._tokens.token}"
                return (await http.post("/retrieve", json=body, headers=headers)).raise_for_status()

        try:
            response = await call(self._circuit, attempt, self._timeout_s, self._slots)
        except httpx.HTTPStatusError as error:
            status, text = error.response.status_code, error.response.text[:500]
            hint = f"; look at {TOKEN_SETTING}" if status == 401 else ""
            raise RefusedError(
                f"the retriever at {self._circuit.address} rejected a search ({status}): {text}{hint}"
            ) from None
        except httpx.DecodingError as error:
            raise self._malformed(error) from None
        try:
            return _parse_result(response, len(queries))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._malformed(error) from None

    def _malformed(self, error: Exception) -> MalformedReplyError:
        address = self._circuit.address
        return MalformedReplyError(
            f"the answer from {address} is not of the /retrieve format ({error!r}): is it a retriever's address?"
        )


def _fail(searches: Sequence[_Search], error: Exception) -> None:
    for search in searches:
        if not search.found.done():
            search.found.set_exception(error)


def _cancel(searches: Sequence[_Search], _: object) -> None:
    """Cancel searches without a result: the client is closed, perhaps before their request has begun."""
    for search in searches:
        search.found.cancel()


def _cancel_unwanted(task: asyncio.Task[None], searches: Sequence[_Search], _: object) -> None:
    if all(search.found.cancelled() for search in searches):
        task.cancel()


def _parse_result(response: httpx.Response, queries: int) -> SearchResult:
    lists = response.json()["result"]
    if len(lists) != queries:
        raise ValueError(f"{len(lists)} results for {queries} queries")
    headers = response.headers
    return SearchResult(
        documents=[[_parse_document(pair) for pair in pairs] for pairs in lists],
        provenance=Provenance(
            corpus_digest=headers.get("x-forage-corpus-digest", ""),
            encoder_digest=headers.get("x-forage-encoder-digest", ""),
            index_digest=headers.get("x-forage-index-digest", ""),
            mode=headers.get("x-forage-mode", ""),
        ),
        partial=headers.get("x-forage-partial") == "1",
    )


def _parse_document(pair: Mapping[str, Any]) -> Document:
    row = pair["document"]
    if not isinstance(row["contents"], str):  # protobuf would silently drop a null
        raise TypeError("contents is not a string")
    return Document(id=str(row["id"]), contents=row["contents"], score=float(pair["score"]))
