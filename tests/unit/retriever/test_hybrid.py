"""Reciprocal rank fusion, and the searchers that it fuses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage_retriever.hits import Filters, Hit
from forage_retriever.search.hybrid import HybridIndex, choose_depth, fuse_rankings
from forage_runtime.settings import RetrieverSettings

RRF_K = 60
rankings = st.lists(st.lists(st.integers(0, 20), unique=True, max_size=10), min_size=1, max_size=3)


class Ranking:
    """A searcher that always finds the same rows, and records its calls."""

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = rows
        self.asked: list[tuple[list[str], int, Filters]] = []

    def search(self, queries: Sequence[str], topk: int, filters: Filters = ()) -> list[list[Hit]]:
        self.asked.append((list(queries), topk, filters))
        return [[Hit(row, 1 / place) for place, row in enumerate(self._rows[:topk], 1)] for _ in queries]


@pytest.mark.parametrize(
    ("lists", "weights", "want"),
    [
        ([[1, 2, 3], [1, 2, 3]], [1, 1], [1, 2, 3]),
        ([[1, 2], [3, 2]], [1, 1], [2, 1, 3]),
        ([[1, 2], [3, 4]], [1, 1], [1, 3, 2, 4]),
        ([[1, 2], [3, 4]], [1, 2], [3, 4, 1, 2]),
        ([[], [3, 4]], [5, 1], [3, 4]),
        ([[], []], [1, 1], []),
    ],
)
def test_ranks_are_fused_by_weight(lists: list[list[int]], weights: list[float], want: list[int]) -> None:
    assert [hit.row for hit in fuse_rankings(lists, weights, 10, RRF_K)] == want


def test_a_score_is_the_sum_of_weighted_reciprocal_ranks() -> None:
    best = fuse_rankings([[7], [8, 7]], [2.0, 1.0], 1, 10)[0]
    assert best == (7, pytest.approx(2 / 11 + 1 / 12))


@given(rankings, st.integers(1, 30))
def test_fusion_keeps_every_row_once_best_first(lists: list[list[int]], topk: int) -> None:
    hits = fuse_rankings(lists, [1.0] * len(lists), topk, RRF_K)
    rows = [hit.row for hit in hits]
    everything = {row for ranking in lists for row in ranking}
    assert len(rows) == len(set(rows)) == min(topk, len(everything))
    assert set(rows) <= everything
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


@given(st.lists(st.integers(0, 20), unique=True))
def test_one_ranking_alone_keeps_its_order(ranking: list[int]) -> None:
    assert [hit.row for hit in fuse_rankings([ranking, []], [1.0, 1.0], 100, RRF_K)] == ranking


def test_every_ranking_is_searched_with_the_same_depth_and_filters() -> None:
    parts = [Ranking([1]), Ranking([2, 3]), Ranking([3, 2])]
    filters: Filters = (("lang", ("nb",)),)
    HybridIndex(*parts, RetrieverSettings()).search(["a", "b"], 30, filters)
    assert [part.asked for part in parts] == [[(["a", "b"], choose_depth(30), filters)]] * 3
    assert choose_depth(30) == 80


@pytest.mark.parametrize(
    ("changed", "want"),
    [
        ({}, [1, 3, 2]),
        ({"bm25_weight": 9.0}, [2, 3, 1]),
        ({"bm25_weight": 3.0, "dense_weight": 1.2}, [1, 2, 3]),
        ({"bm25_weight": 3.0, "dense_weight": 1.2, "rrf_k": 100}, [2, 3, 1]),
    ],
)
def test_weights_come_from_the_settings(changed: dict[str, float], want: list[int]) -> None:
    settings = RetrieverSettings.model_validate(changed)
    index = HybridIndex(Ranking([1]), Ranking([2, 3]), Ranking([3, 2]), settings)
    hits = index.search(["anything"], 3)[0]
    assert [hit.row for hit in hits] == want
