"""Intervals, differences and estimates over k samples: pure functions, that give the same for the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import comb, prod

import numpy as np

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
    """Of two means over the same questions, B less A.

    Attributes:
        p: two-sided; the smallest that so many resamples can tell is 2 / (RESAMPLES + 1).
    """

    mean: float
    low: float
    high: float
    p: float


def estimate_mean(values: Sequence[float]) -> Estimate | None:
    """The mean of one value a question, with the percentile bootstrap's interval (Efron 1979); None without values."""
    if not values:
        return None
    low, high = _interval(_resampled_means(values))
    return Estimate(float(np.mean(values)), low, high)


def paired_difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Whether B is better than A, by resampling the differences question by question.

    p is twice the smaller share of resampled means on either side of 0, each share with one more counted in.

    Raises:
        ValueError: there are no questions, or not as many values of A as of B.
    """
    differences = [after - before for before, after in zip(a, b, strict=True)]
    if not differences:
        raise ValueError("there are no questions to compare on")
    means = _resampled_means(differences)
    low, high = _interval(means)
    tail = min((means <= 1e-12).sum(), (means >= -1e-12).sum())
    p = min(1.0, 2 * (int(tail) + 1) / (RESAMPLES + 1))
    return Difference(float(np.mean(differences)), low, high, p)


def sample_counts(samples: int) -> list[int]:
    """Numbers of samples that are looked at: 1, 2, 4, … and all."""
    return sorted({*(2**power for power in range(samples.bit_length()) if 2**power <= samples), samples})


def pass_at_k(right: int, n: int, k: int) -> float:
    """Chance that at least one of k out of n samples is right, `right` of which are (Chen et al. 2021, unbiased)."""
    return 1.0 - prod(1.0 - k / place for place in range(n - right + 1, n + 1))


def majority_at_k(answers: Sequence[str | None], rights: Sequence[bool], k: int) -> float:
    """Chance that the answer which most of k samples give is right, over every choice of k out of the samples.

    Of several answers with most votes each is as likely; None gives no vote, and where nobody votes nothing is right.
    Exact, not sampled.

    Args:
        answers: of each sample, such that equal answers are equal texts.
        rights: whether it is right, equal for equal answers.
    """
    votes = Counter((answer, right) for answer, right in zip(answers, rights, strict=True) if answer is not None)
    classes = sorted((count, right) for (_, right), count in votes.items())
    return _majority(tuple(classes), len(answers) - votes.total(), k)


@cache
def _majority(classes: tuple[tuple[int, bool], ...], silent: int, k: int) -> float:
    total = comb(sum(count for count, _ in classes) + silent, k)
    found = 0.0
    for most in range(1, min(k, max((count for count, _ in classes), default=0)) + 1):
        # (samples chosen, answers with `most` votes, right ones among these) → ways to choose
        ways = Counter({(0, 0, 0): 1})
        for count, right in classes:
            grown: Counter[tuple[int, int, int]] = Counter()
            for (chosen, tied, good), number in ways.items():
                for votes in range(min(count, most, k - chosen) + 1):
                    wins = votes == most
                    grown[chosen + votes, tied + wins, good + (wins and right)] += number * comb(count, votes)
            ways = grown
        for (chosen, tied, good), number in ways.items():
            if tied:
                found += number * comb(silent, k - chosen) * good / tied / total
    return found


def _resampled_means(values: Sequence[float]) -> np.ndarray:
    """(RESAMPLES,) means. Resampling questions is drawing how often each distinct value comes up."""
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


def _interval(means: np.ndarray) -> tuple[float, float]:
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(means, [tail, 100 - tail])
    return float(low), float(high)
