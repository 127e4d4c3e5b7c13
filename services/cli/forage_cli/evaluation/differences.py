"""Differences of means over the same questions, with bootstrap intervals and p-values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forage_probe.statistics import RESAMPLES, find_interval, resample_means


@dataclass(frozen=True)
class Difference:
    """The difference of two means over the same questions, B minus A.

    Attributes:
        p: two-sided p-value; its smallest value is 2 / (RESAMPLES + 1).
    """

    mean: float
    low: float
    high: float
    p: float


def paired_difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Test whether B is better than A, by resampling the differences per question.

    p is twice the smaller share of resampled means on one side of 0, where each count is increased by one.

    Raises:
        ValueError: there are no questions, or A and B have different numbers of values.
    """
    differences = [after - before for before, after in zip(a, b, strict=True)]
    if not differences:
        raise ValueError("there are no questions to compare on")
    means = resample_means(differences)
    low, high = find_interval(means)
    tail = min((means <= 1e-12).sum(), (means >= -1e-12).sum())
    p = min(1.0, 2 * (int(tail) + 1) / (RESAMPLES + 1))
    return Difference(float(np.mean(differences)), low, high, p)
