"""Bootstrap intervals and paired differences, compared with scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from forage_records.statistics import (
    ALL,
    RESAMPLES,
    Outcome,
    compare_sources,
    estimate_mean,
    find_outcome,
    paired_difference,
)

GENERATOR = np.random.default_rng(7)
SAMPLES = {
    "exact match": (GENERATOR.random(200) < 0.3).astype(float),
    "F1": GENERATOR.random(80) ** 2,
    "few": np.array([0.0, 1.0, 1.0, 0.5, 0.0, 1.0]),
}


@pytest.mark.parametrize("values", SAMPLES.values(), ids=SAMPLES)
def test_the_interval_equals_that_of_scipy(values: np.ndarray) -> None:
    expected = stats.bootstrap(
        (values,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    found = estimate_mean(list(values))
    assert found is not None
    assert found.mean == pytest.approx(values.mean())
    noise = 4 * expected.high / np.sqrt(RESAMPLES) + 1 / len(values) / 2
    assert found.low == pytest.approx(expected.low, abs=noise)
    assert found.high == pytest.approx(expected.high, abs=noise)


def test_the_interval_covers_the_true_mean_at_its_confidence() -> None:
    hits = 0
    for _ in range(200):
        found = estimate_mean(list((GENERATOR.random(60) < 0.4).astype(float)))
        assert found is not None
        hits += found.low <= 0.4 <= found.high
    assert 0.87 <= hits / 200 <= 1.0  # of 0.95, three standard errors and the percentile bootstrap's own shortness


def test_the_interval_is_deterministic_and_missing_without_values() -> None:
    assert estimate_mean([]) is None
    assert estimate_mean([0.0, 1.0, 1.0]) == estimate_mean([1.0, 0.0, 1.0])
    assert estimate_mean([1.0] * 5) is not None
    assert estimate_mean([1.0] * 5) == estimate_mean([1.0] * 7)  # no spread, no width


def test_a_real_difference_is_significant() -> None:
    a = (GENERATOR.random(300) < 0.4).astype(float)
    better = np.where(GENERATOR.random(300) < 0.2, 1.0, a)
    found = paired_difference(list(a), list(better))
    assert found.mean == pytest.approx(float((better - a).mean()))
    assert 0 < found.low < found.mean < found.high
    assert found.p == pytest.approx(2 / (RESAMPLES + 1))
    back = paired_difference(list(better), list(a))
    assert (back.mean, back.p) == (pytest.approx(-found.mean), found.p)


@pytest.mark.parametrize("shift", [0.0, 0.02, 0.05])
def test_the_p_value_agrees_with_the_t_test(shift: float) -> None:
    a = GENERATOR.random(400)
    b = a + GENERATOR.normal(shift, 0.5, 400)
    found = paired_difference(list(a), list(b))
    assert found.p == pytest.approx(stats.ttest_rel(b, a).pvalue, abs=0.03)


def test_equal_samples_have_p_value_1_and_missing_values_are_an_error() -> None:
    found = paired_difference([0.0, 1.0], [0.0, 1.0])
    assert (found.mean, found.low, found.high, found.p) == (0.0, 0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="no questions"):
        paired_difference([], [])
    with pytest.raises(ValueError, match="zip"):
        paired_difference([1.0], [1.0, 0.0])


@pytest.mark.parametrize(
    ("a", "b", "outcome"),
    [
        (0, 1, Outcome.WON),
        (0.25, 0.5, Outcome.WON),
        (1, 0.5, Outcome.LOST),
        (0.5, 0.5, Outcome.BOTH),
        (0, 0, "neither"),
    ],
)
def test_an_outcome_follows_the_share_of_samples_that_is_right(a: float, b: float, outcome: Outcome) -> None:
    assert find_outcome(a, b) is Outcome(outcome)


def test_sources_are_compared_in_order_and_several_together_at_the_end() -> None:
    first, second, whole = compare_sources([("nq", 0, 1), ("hotpotqa", 1, 1), ("nq", 0, 0)])
    assert [(one.data_source, one.questions, one.em_a, one.em_b) for one in (first, second, whole)] == [
        ("nq", 2, 0.0, 0.5),
        ("hotpotqa", 1, 1.0, 1.0),
        (ALL, 3, pytest.approx(1 / 3), pytest.approx(2 / 3)),
    ]
    assert whole.outcomes == {Outcome.WON: 1, Outcome.LOST: 0, Outcome.BOTH: 1, Outcome.NEITHER: 1}
    assert [one.data_source for one in compare_sources([("nq", 0, 1)])] == ["nq"]
    assert compare_sources([]) == []
