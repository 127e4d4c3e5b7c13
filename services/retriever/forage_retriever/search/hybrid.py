"""Hybrid search: BM25 and dense rankings fused by reciprocal rank (Cormack, Clarke and Büttcher, SIGIR 2009)."""

from __future__ import annotations

from collections.abc import Sequence

from forage_common.settings import RetrieverSettings
from forage_retriever.hits import Filters, Hit, Searcher

MIN_CANDIDATES = 20
"""Of each ranking; a passage that only one of them finds deep down cannot win."""


def depth(topk: int) -> int:
    """How many passages of each ranking are fused."""
    return max(MIN_CANDIDATES, 2 * topk)


def weights(settings: RetrieverSettings) -> tuple[float, float, float]:
    """Of exact titles, BM25 and dense; by default a title counts more than both rankings can give another passage."""
    return settings.title_weight, settings.bm25_weight, settings.dense_weight


def fuse(rankings: Sequence[Sequence[int]], weights: Sequence[float], topk: int, rrf_k: int) -> list[Hit]:
    """The best `topk` rows by Σ weight / (rrf_k + rank), rank from 1; ties by first ranking, then by rank in it."""
    scores: dict[int, float] = {}
    for ranking, weight in zip(rankings, weights, strict=True):
        for rank, row in enumerate(ranking, 1):
            scores[row] = scores.get(row, 0.0) + weight / (rrf_k + rank)
    best = sorted(scores.items(), key=lambda item: -item[1])[:topk]
    return [Hit(row, score) for row, score in best]


class HybridIndex:
    """Exact titles, BM25 and a dense searcher as one."""

    def __init__(self, titles: Searcher, bm25: Searcher, dense: Searcher, settings: RetrieverSettings) -> None:
        self._searchers = (titles, bm25, dense)
        self._weights = weights(settings)
        self._rrf_k = settings.rrf_k

    def search(self, queries: Sequence[str], topk: int, filters: Filters = ()) -> list[list[Hit]]:
        """The passages that rank best in all of them.

        Raises:
            UnknownFieldError: a filter names a field that the index does not have.
        """
        found = [searcher.search(queries, depth(topk), filters) for searcher in self._searchers]
        return [
            fuse([[hit.row for hit in ranking] for ranking in rankings], self._weights, topk, self._rrf_k)
            for rankings in zip(*found, strict=True)
        ]
