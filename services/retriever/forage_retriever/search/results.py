"""Results of vector searches: the best of one is the head of the best of three, whatever was asked for.

A search that looks deeper may find a better passage: it has more candidates of an approximate index. So such searches
have the depths of a ladder, and what a deeper rung finds comes after all that the rungs below it found.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Results: TypeAlias = tuple[NDArray[np.float32], NDArray[np.int64]]
"""Scores and rows [n, k], best first; -inf and -1 where there are no more."""

FIRST_RUNG, _STEP = 10, 4


def list_rungs(topk: int) -> list[int]:
    """The numbers of results of the searches for `topk` results, of which the last has at least as many."""
    rungs = [FIRST_RUNG]
    while rungs[-1] < topk:
        rungs.append(_STEP * rungs[-1])
    return rungs


def list_extras(k: int) -> list[int]:
    """How many more results are asked for than `k`, one after the other, as long as the last ones may be equal."""
    return [max(8, k // 8) * 8**times for times in range(3)]


def sort_results(scores: NDArray[np.float32], rows: NDArray[np.int64]) -> Results:
    """Sort by falling score, then by rising row."""
    order = np.lexsort((rows, -scores), axis=1)
    return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)


def append_results(best: Results | None, more: Results, k: int) -> Results:
    """Append to `best`, until there are `k`, what comes after its last; then what comes before it and is not in it."""
    if best is None:
        return more[0][:, :k], more[1][:, :k]
    (old_scores, old_rows), (scores, rows) = best, more
    count = (old_rows >= 0).sum(axis=1, keepdims=True)
    last = np.maximum(count - 1, 0)
    score, row = np.take_along_axis(old_scores, last, 1), np.take_along_axis(old_rows, last, 1)
    after = (count == 0) | (scores < score) | ((scores == score) & (rows > row))
    missing = (rows < 0) | np.array([np.isin(own, old) for own, old in zip(rows, old_rows, strict=True)])
    kinds = np.concatenate([np.where(old_rows < 0, 3, 0), np.where(missing, 3, np.where(after, 1, 2))], axis=1)
    order = np.argsort(kinds, axis=1, kind="stable")[:, :k]
    scores, rows = np.concatenate([old_scores, scores], axis=1), np.concatenate([old_rows, rows], axis=1)
    none = np.take_along_axis(kinds, order, 1) == 3
    scores, rows = np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
    return np.where(none, np.float32(-np.inf), scores), np.where(none, np.int64(-1), rows)


def bound_rounding(vectors: NDArray[np.float32], longest: float) -> NDArray[np.float32]:
    """How far inner products [n] in single precision with vectors of this length are from the exact ones at most."""
    lengths: NDArray[np.float32] = np.linalg.norm(vectors, axis=1)
    return lengths * np.float32(1e-6 * longest)
