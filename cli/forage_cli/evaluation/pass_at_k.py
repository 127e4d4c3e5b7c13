"""Measures over k of n samples: pass@k and majority@k. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from math import comb, prod


def sample_counts(samples: int) -> list[int]:
    """Values of k to report: powers of two, and all samples."""
    return sorted({*(2**power for power in range(samples.bit_length()) if 2**power <= samples), samples})


def pass_at_k(right: int, n: int, k: int) -> float:
    """Probability that at least one of k of n samples is correct, given `right` correct ones (Chen et al. 2021)."""
    return 1.0 - prod(1.0 - k / place for place in range(n - right + 1, n + 1))


def majority_at_k(answers: Sequence[str | None], rights: Sequence[bool], k: int) -> float:
    """Probability that the majority answer of k samples is correct, over all choices of k of the samples.

    Ties are broken uniformly. None is no vote; without votes the result is wrong. Exact, not sampled.

    Args:
        answers: one per sample, normalised: equal answers are equal texts.
        rights: whether each answer is correct; equal for equal answers.
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
