"""Intervals and estimates against scipy and against counting every case."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from forage_common.statistics import (
    RESAMPLES,
    estimate_mean,
    majority_at_k,
    paired_difference,
    pass_at_k,
    sample_counts,
)

GENERATOR = np.random.default_rng(7)
SAMPLES = {
    "exact match": (GENERATOR.random(200) < 0.3).astype(float),
    "F1": GENERATOR.random(80) ** 2,
    "few": np.array([0.0, 1.0, 1.0, 0.5, 0.0, 1.0]),
}


@pytest.mark.parametrize("values", SAMPLES.values(), ids=SAMPLES)
def test_an_interval_is_the_one_that_scipy_finds(values: np.ndarray) -> None:
    expected = stats.bootstrap(
        (values,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    found = estimate_mean(list(values))
    assert found is not None
    assert found.mean == pytest.approx(values.mean())
    noise = 4 * expected.high / np.sqrt(RESAMPLES) + 1 / len(values) / 2
    assert found.low == pytest.approx(expected.low, abs=noise)
    assert found.high == pytest.approx(expected.high, abs=noise)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    hits = 0
    for _ in range(200):
        found = estimate_mean(list((GENERATOR.random(60) < 0.4).astype(float)))
        assert found is not None
        hits += found.low <= 0.4 <= found.high
    assert 0.87 <= hits / 200 <= 1.0  # of 0.95, three standard errors and the percentile bootstrap's own shortness


def test_an_interval_is_the_same_every_time_and_none_without_values() -> None:
    assert estimate_mean([]) is None
    assert estimate_mean([0.0, 1.0, 1.0]) == estimate_mean([1.0, 0.0, 1.0])
    assert estimate_mean([1.0] * 5) is not None
    assert estimate_mean([1.0] * 5) == estimate_mean([1.0] * 7)  # no spread, no width


def test_a_difference_is_told_from_none() -> None:
    a = (GENERATOR.random(300) < 0.4).astype(float)
    better = np.where(GENERATOR.random(300) < 0.2, 1.0, a)
    found = paired_difference(list(a), list(better))
    assert found.mean == pytest.approx(float((better - a).mean()))
    assert 0 < found.low < found.mean < found.high
    assert found.p == pytest.approx(2 / (RESAMPLES + 1))
    back = paired_difference(list(better), list(a))
    assert (back.mean, back.p) == (pytest.approx(-found.mean), found.p)


@pytest.mark.parametrize("shift", [0.0, 0.02, 0.05])
def test_p_agrees_with_the_t_test_on_many_questions(shift: float) -> None:
    a = GENERATOR.random(400)
    b = a + GENERATOR.normal(shift, 0.5, 400)
    found = paired_difference(list(a), list(b))
    assert found.p == pytest.approx(stats.ttest_rel(b, a).pvalue, abs=0.03)


def test_no_difference_has_p_1_and_nothing_to_compare_is_an_error() -> None:
    found = paired_difference([0.0, 1.0], [0.0, 1.0])
    assert (found.mean, found.low, found.high, found.p) == (0.0, 0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="no questions"):
        paired_difference([], [])
    with pytest.raises(ValueError, match="zip"):
        paired_difference([1.0], [1.0, 0.0])


def test_the_numbers_of_samples_that_are_looked_at() -> None:
    assert [sample_counts(n) for n in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(rights: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rights)))
    every = [any(choice) for choice in combinations(rights, k)]
    assert pass_at_k(sum(rights), len(rights), k) == pytest.approx(fmean(every))


@given(st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=9), st.data())
def test_majority_at_k_is_the_mean_over_every_choice(answers: list[str | None], data: st.DataObject) -> None:
    accepted = data.draw(st.sets(st.sampled_from("abc")))
    rights = [answer in accepted for answer in answers]
    k = data.draw(st.integers(1, len(answers)))

    def voted(choice: tuple[str | None, ...]) -> float:
        votes = [answer for answer in choice if answer is not None]
        most = max(map(votes.count, votes), default=0)
        winners = {answer for answer in votes if votes.count(answer) == most}
        return fmean(answer in accepted for answer in winners) if winners else 0.0

    assert majority_at_k(answers, rights, k) == pytest.approx(fmean(map(voted, combinations(answers, k))))


def test_a_minority_that_is_right_does_not_win() -> None:
    answers = ["b", "b", "b", "a", None]
    rights = [False, False, False, True, False]
    assert majority_at_k(answers, rights, 5) == 0.0
    assert majority_at_k(answers, rights, 1) == pytest.approx(0.2)
    assert pass_at_k(1, 5, 5) == 1.0
