"""Hybrid search: BM25 and dense rankings fused by reciprocal rank (Cormack, Clarke and Büttcher, SIGIR 2009)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from forage_retriever.hits import Filters, Hit, Searcher
from forage_retriever.search.results import list_rungs
from forage_runtime.settings import RetrieverSettings

TITLE_WEIGHT = 4.0
"""Weight of passages whose title is the query: at least twice what the other rankings weigh together, in every pair of
weights that `forage index tune` tries, so that such a passage is first."""


def choose_depth(topk: int) -> int:
    """Number of passages of each ranking that are fused."""
    return 2 * list_rungs(topk)[-1]


def read_weights(settings: RetrieverSettings) -> tuple[float, float, float]:
    """The weights of exact titles, BM25 and dense; by default an exact title outweighs both other rankings together."""
    return TITLE_WEIGHT, settings.bm25_weight, settings.dense_weight


def fuse_rankings(rankings: Sequence[Sequence[int]], weights: Sequence[float], topk: int, rrf_k: int) -> list[Hit]:
    """The best `topk` rows by Σ weight / (rrf_k + rank), rank from 1; ties by first ranking, then by rank in it.

    Those for a smaller `topk` are the head of these: a row that gains from ranks further down comes after them, with a
    score that is no higher.
    """
    best: dict[int, float] = {}
    for rung in list_rungs(topk):
        scores: dict[int, float] = {}
        for ranking, weight in zip(rankings, weights, strict=True):
            for rank, row in enumerate(ranking[: choose_depth(rung)], 1):
                scores[row] = scores.get(row, 0.0) + weight / (rrf_k + rank)
        least = min(best.values(), default=math.inf)
        for row, score in sorted(scores.items(), key=lambda item: -item[1]):
            if len(best) == rung:
                break
            best.setdefault(row, min(score, least))
    return [Hit(row, score) for row, score in best.items()][:topk]


class HybridIndex:
    """Fuses the searchers of exact titles, BM25 and vectors."""

    def __init__(self, titles: Searcher, bm25: Searcher, dense: Searcher, settings: RetrieverSettings) -> None:
        self._searchers = (titles, bm25, dense)
        self._weights = read_weights(settings)
        self._rrf_k = settings.rrf_k

    def search(self, queries: Sequence[str], topk: int, filters: Filters = ()) -> list[list[Hit]]:
        """The best passages by fused rank.

        Raises:
            UnknownFieldError: a filter names a field that the index does not have.
        """
        results = [searcher.search(queries, choose_depth(topk), filters) for searcher in self._searchers]
        return [
            fuse_rankings([[hit.row for hit in ranking] for ranking in rankings], self._weights, topk, self._rrf_k)
            for rankings in zip(*results, strict=True)
        ]
