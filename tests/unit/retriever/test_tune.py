"""Tuning: a fusion is chosen by one half of the questions and judged by the other, and noise is called noise."""

from __future__ import annotations

import numpy as np
import pytest

from forage_retriever.command.fusion import (
    RRF_K,
    WEIGHTS,
    Fusion,
    bootstrap,
    list_fusions,
    score_ranking,
    split_questions,
)
from forage_retriever.command.questions import GoldQuestion
from forage_runtime.settings import RetrieverSettings

WORDS = ("harbour", "glacier", "violin", "copper", "lantern", "orchard", "compass", "marble")


@pytest.mark.parametrize(
    ("rows", "gold", "missing", "want"),
    [
        ([7, 8], {7}, 0, 1.0),
        ([8, 7], {7}, 0, 1 / np.log2(3)),
        ([8, 9], {7}, 0, 0.0),
        ([7], {7}, 1, 1 / (1 + 1 / np.log2(3))),
        ([*range(10, 20), 7], {7}, 0, 0.0),
    ],
)
def test_a_ranking_scores_by_the_places_of_its_gold_passages(
    rows: list[int], gold: set[int], missing: int, want: float
) -> None:
    assert score_ranking(rows, frozenset(gold), missing) == pytest.approx(want)


def test_no_weights_of_the_grid_put_anything_before_an_exact_title() -> None:
    for fusion in list_fusions():
        assert fusion.fuse(([9], [1, 2, 3], [1, 2, 3]))[0] == 9
    assert len(list_fusions()) == len(WEIGHTS) * len(RRF_K)


def test_the_default_is_one_of_the_grid() -> None:
    assert Fusion.from_settings(RetrieverSettings()) in list_fusions()


def test_halves_are_disjoint_and_have_as_many_of_each_source() -> None:
    questions = [GoldQuestion(f"{number}?", frozenset({"1"}), "ab"[number % 2]) for number in range(40)]
    first, second = split_questions(questions)
    assert {question.text for question in (*first, *second)} == {question.text for question in questions}
    assert len(first) == len(second) == 20
    assert [question.source for question in first].count("a") == 10
    assert split_questions(questions) == (first, second)


def test_an_interval_holds_the_mean_and_narrows_with_more_questions() -> None:
    gains = np.array([0.0, 0.0, 0.0, 1.0])
    low, high = bootstrap(np.repeat(gains, 25))
    wide_low, wide_high = bootstrap(gains)
    assert low < 0.25 < high
    assert high - low < wide_high - wide_low
