"""The front: searches all shards of a corpus at once and merges their results.

Scores of one ranking are compared across shards: inner products are the same as in one index, and so are BM25 scores,
but for rounding, because a shard knows the statistics of the whole corpus. Hybrid search fuses the merged rankings as
one process does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from sys import getsizeof
from typing import Any

from forage_proto.v1 import retriever_pb2
from forage_retriever import artifacts
from forage_retriever.hits import Hit, Provenance, sort_scores
from forage_retriever.index.load import TITLE
from forage_retriever.search import hybrid
from forage_retriever.serve.batcher import MOST_WAITING, SHED, OverloadedError
from forage_retriever.serve.retrieval import MAX_DOCUMENTS, NotReadyError
from forage_retriever.serve.shard import SHARD_FAILURES, Shard, ShardUnavailableError
from forage_retriever.serve.source import Answer, InvalidRequestError, QueryResult
from forage_retriever.serve.swap import report_provenance
from forage_retriever.serve.urgency import Urgency
from forage_retriever.serve.waiting import SearchOptions
from forage_runtime.errors import SettingsError
from forage_runtime.settings import RetrievalMode, Settings
from forage_runtime.telemetry.health import Health
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import Wait, waiting

SHARD_TIMEOUT_S = 10.0
"""Limit after which a shard that has not replied is left out of the answer."""

START_GRACE_S = 60.0
"""Limit of the wait for all shards at start; after it, the front serves those that reply."""

PART_QUERIES = 512
"""Most queries that the shards search at a time of a larger request: all of it would take longer than
`SHARD_TIMEOUT_S`, or be more documents than a shard gives in one reply."""

_POLL_S = 0.05
_FUSED = (TITLE, RetrievalMode.BM25, RetrievalMode.DENSE)


_NUMBER_BYTES = 200
"""Of a passage's place in the lists and the dictionary of a `_MergedPassages`."""


class _MergedPassages:
    """The passages of one query from all shards, numbered in order of arrival."""

    def __init__(self) -> None:
        self.rows: list[bytes] = []
        self.ids: list[str] = []
        self._numbers: dict[tuple[int, str], int] = {}

    @property
    def contents(self) -> Sequence[str]:
        return [json.loads(row)["contents"] for row in self.rows]

    def count_bytes(self) -> int:
        """Memory of the passages, about."""
        return sum(map(getsizeof, self.rows)) + sum(map(getsizeof, self.ids)) + len(self.rows) * _NUMBER_BYTES

    def add(self, shard: int, id: str, row: bytes) -> int:
        """The number of a passage, which is added if it is new."""
        number = self._numbers.setdefault((shard, id), len(self.rows))
        if number == len(self.rows):
            self.rows.append(row)
            self.ids.append(id)
        return number


class Front:
    """Serves shards as one source."""

    def __init__(self, settings: Settings, health: Health, max_waiting: int = MOST_WAITING) -> None:
        """Start to watch the shards.

        Raises:
            SettingsError: a setting needs a corpus, which a front has not.
        """
        own = settings.retriever
        if own.rerank.model:
            raise SettingsError("retriever.rerank is set together with retriever.shards: rerank in the shards instead")
        self._settings = own
        self._health = health
        self._shards = [Shard(address, settings, self._update_health) for address in own.shards]
        self._watching = [asyncio.create_task(shard.watch()) for shard in self._shards]
        self._waiting, self._max_waiting = 0, max_waiting

    @property
    def provenance(self) -> Provenance:
        known = tuple(shard.provenance for shard in self._shards)
        return _join_provenance(known, self._settings.mode)

    async def start(self) -> None:
        """Wait until all shards reply, or until some do and `START_GRACE_S` has passed."""
        why = "searches need at least one shard; with one it starts after a while"
        with waiting("shards", on="other retrievers", limit_s=None, why_unlimited=why) as wait:
            await self._wait_for_shards(wait)

    async def _wait_for_shards(self, wait: Wait) -> None:
        deadline = asyncio.get_running_loop().time() + START_GRACE_S
        while missing := [shard.address for shard in self._shards if not shard.is_up]:
            wait.detail = f"no answer yet from shards {', '.join(missing)}"
            self._health.wait_for("start", wait.detail)
            if len(missing) < len(self._shards) and asyncio.get_running_loop().time() > deadline:
                get_logger().warning("starting_without_shards", shards=missing)
                return
            await asyncio.sleep(_POLL_S)  # wait: named by the caller

    def fit_options(self, options: SearchOptions) -> SearchOptions:
        return options._replace(topk=min(options.topk, MAX_DOCUMENTS))

    async def search(self, queries: Sequence[str], options: SearchOptions, urgency: Urgency) -> Answer:
        if self._waiting and self._waiting + len(queries) > self._max_waiting:
            SHED.inc(len(queries))
            raise OverloadedError(f"{self._waiting} queries are waiting already")
        self._waiting += len(queries)
        deepest = max(plan.topk for plan in self._plan_rankings(options))
        size = max(1, min(PART_QUERIES, MAX_DOCUMENTS // max(deepest, 1)))
        try:
            while True:
                provenance = self.provenance
                results: list[QueryResult] = []
                for begin in range(0, len(queries), size):
                    results += await self._search_part(queries[begin : begin + size], options, urgency)
                if len(queries) <= size or self.provenance == provenance:  # else results of two indexes
                    return replace(self.provenance, mode=options.mode), results
        finally:
            self._waiting -= len(queries)

    async def _search_part(self, queries: Sequence[str], options: SearchOptions, urgency: Urgency) -> list[QueryResult]:
        replies = await asyncio.gather(
            *(
                self._search_shard(shard, queries, one, urgency)
                for one in self._plan_rankings(options)
                for shard in self._shards
            ),
            return_exceptions=True,
        )
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, ShardUnavailableError):
                raise reply
        answered = [None if isinstance(reply, BaseException) else reply for reply in replies]
        if not any(answered):
            raise NotReadyError("no shard answers")
        return [self._merge_replies(answered, place, options) for place in range(len(queries))]

    async def find_pages(self, urls: Sequence[str]) -> list[dict[str, Any] | None]:
        raise InvalidRequestError("this retriever merges shards, which find pages by URL: ask them")

    async def close(self) -> None:
        for watching in self._watching:
            watching.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await asyncio.gather(*(shard.close() for shard in self._shards))

    def _plan_rankings(self, options: SearchOptions) -> list[SearchOptions]:
        """The searches of every shard whose rankings are merged."""
        if options.mode != RetrievalMode.HYBRID:
            return [options]
        depth = hybrid.choose_depth(options.topk)
        return [options._replace(mode=mode, topk=depth) for mode in _FUSED]

    async def _search_shard(
        self, shard: Shard, queries: Sequence[str], options: SearchOptions, urgency: Urgency
    ) -> retriever_pb2.RetrieveResponse:
        if shard.provenance is not None and shard.provenance.encoder != self.provenance.encoder:
            SHARD_FAILURES.labels(shard.address, "OTHER_ENCODER").inc()
            raise ShardUnavailableError(f"shard {shard.address} has another encoder")
        reply = await shard.search(queries, options, replace(urgency, timeout_s=SHARD_TIMEOUT_S))
        if len(reply.results) != len(queries):
            SHARD_FAILURES.labels(shard.address, "MALFORMED").inc()
            raise ShardUnavailableError(
                f"shard {shard.address} gave {len(reply.results)} results for {len(queries)} queries"
            )
        return reply

    def _merge_replies(
        self, replies: Sequence[retriever_pb2.RetrieveResponse | None], place: int, options: SearchOptions
    ) -> QueryResult:
        """The result of one query, from the replies of all shards to each ranking in turn."""
        passages = _MergedPassages()
        rankings: list[list[Hit]] = []
        count = len(self._shards)
        for number, plan in enumerate(self._plan_rankings(options)):
            ranking: list[Hit] = []
            for shard, reply in enumerate(replies[number * count : (number + 1) * count]):
                part = reply.results[place] if reply is not None else retriever_pb2.DocumentList()
                for document, row in zip(part.documents, part.rows, strict=True):
                    ranking.append(Hit(passages.add(shard, document.id, row), document.score))
            rankings.append(_sort_hits(ranking, plan.mode))
        if len(rankings) > 1:
            depth = hybrid.choose_depth(options.topk)
            rows = [[hit.row for hit in ranking[:depth]] for ranking in rankings]
            best = hybrid.fuse_rankings(rows, hybrid.read_weights(self._settings), options.topk, self._settings.rrf_k)
        else:
            best = rankings[0][: options.topk]
        best_passages = _MergedPassages()
        hits = [Hit(best_passages.add(0, passages.ids[hit.row], passages.rows[hit.row]), hit.score) for hit in best]
        return QueryResult(best_passages, hits, partial=None in replies, own_bytes=best_passages.count_bytes())

    def _update_health(self) -> None:
        """Update readiness and metrics after a shard came, went or changed its index."""
        if any(shard.is_up for shard in self._shards):
            self._health.mark_ready("shards")
        else:
            self._health.wait_for("shards", "no shard answers")
        if len(encoders := {shard.provenance.encoder for shard in self._shards if shard.provenance}) > 1:
            get_logger().error("shards_disagree", encoders=sorted(encoders), remedy="build all shards with one encoder")
        report_provenance(self.provenance)


def _sort_hits(hits: Sequence[Hit], mode: str) -> list[Hit]:
    """The hits of all shards, best first; ties keep the order of the corpus."""
    if mode == RetrievalMode.DENSE:
        return sorted(hits, key=lambda hit: -hit.score)
    return [hits[place] for place in sort_scores([hit.score for hit in hits])]


@lru_cache(16)
def _join_provenance(known: tuple[Provenance | None, ...], mode: str) -> Provenance:
    """The provenance of all shards: digests over theirs, in order."""
    encoder = next((source.encoder for source in known if source), "")
    corpus = artifacts.compute_digest(*(source.corpus if source else "" for source in known))
    return Provenance(
        corpus, encoder, artifacts.compute_digest(*(source.index if source else "" for source in known)), mode
    )
