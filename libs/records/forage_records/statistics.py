"""Means, and differences of means over the same questions, with bootstrap intervals: pure, deterministic functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

import numpy as np

ALL = "all"
"""Name of the data source that stands for all questions, each with the same weight."""
RESAMPLES = 10_000
CONFIDENCE = 0.95
_SEED = 20_260_101
_CELLS = 2_000_000  # of resampled counts in memory at a time


@dataclass(frozen=True)
class Estimate:
    """A mean with its bootstrap interval over questions."""

    mean: float
    low: float
    high: float


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


class Outcome(StrEnum):
    """Change of a question from A to B."""

    WON = "won"
    LOST = "lost"
    BOTH = "both"
    NEITHER = "neither"


@dataclass(frozen=True)
class SourceComparison:
    """Comparison of the answers of two sides to the questions of one data source, or of all."""

    data_source: str
    questions: int
    em_a: float
    em_b: float
    difference: Difference
    outcomes: Mapping[Outcome, int]


def mean_known(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are known; None without any."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def estimate_mean(values: Sequence[float]) -> Estimate | None:
    """The mean of one value per question with its percentile bootstrap interval (Efron 1979); None without values."""
    if not values:
        return None
    low, high = find_interval(resample_means(values))
    return Estimate(float(np.mean(values)), low, high)


def resample_means(values: Sequence[float]) -> np.ndarray:
    """Resample means, (RESAMPLES,): draw how often each distinct value occurs, which equals resampling questions."""
    distinct, counts = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    generator = np.random.default_rng(_SEED)
    rows = max(1, _CELLS // len(distinct))
    parts = []
    for begin in range(0, RESAMPLES, rows):
        size = min(rows, RESAMPLES - begin)
        drawn = generator.multinomial(len(values), counts / len(values), size=size)
        parts.append(drawn @ distinct / len(values))
    means: np.ndarray = np.concatenate(parts)
    return means


def find_interval(means: np.ndarray) -> tuple[float, float]:
    """Find the percentile interval of resampled means."""
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(means, [tail, 100 - tail])
    return float(low), float(high)


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


def find_outcome(a: float, b: float) -> Outcome:
    """The change of a question from A to B by the share of its samples that is right."""
    if a == b:
        return Outcome.BOTH if b else Outcome.NEITHER
    return Outcome.WON if b > a else Outcome.LOST


def compare_sources(pairs: Iterable[tuple[str, float, float]]) -> list[SourceComparison]:
    """Compare A with B on each data source, in the order of the pairs; with several, `ALL` is the last.

    Args:
        pairs: data source, A's and B's exact match of each question that both answered.
    """
    parts: dict[str, list[tuple[float, float]]] = {}
    for source, a, b in pairs:
        parts.setdefault(source, []).append((a, b))
    if len(parts) > 1:
        parts[ALL] = [pair for part in parts.values() for pair in part]
    return [_compare_source(source, part) for source, part in parts.items()]


def _compare_source(source: str, pairs: Sequence[tuple[float, float]]) -> SourceComparison:
    a, b = zip(*pairs, strict=True)
    counts = Counter(find_outcome(*pair) for pair in pairs)
    outcomes = {outcome: counts[outcome] for outcome in Outcome}
    return SourceComparison(source, len(pairs), fmean(a), fmean(b), paired_difference(a, b), outcomes)
