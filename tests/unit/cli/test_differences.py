"""Paired differences, compared with scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from forage_cli.evaluation.differences import paired_difference
from forage_probe.statistics import RESAMPLES

GENERATOR = np.random.default_rng(7)


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
