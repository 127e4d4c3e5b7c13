"""Laws of cost and recall in the number of vectors: fitted to measured sizes, checked on the largest, extrapolated.

Seconds of a search, with n vectors, c cells, nprobe p, efSearch e:

    Flat, SQ8   base + passage·n
    IVF         base + cell·c + code·n·p/c         (c is in the ratio of the root of n)
    HNSW        base + step·e·log2(n)

CPU seconds of building: n (Flat, SQ8); c·(n + 10·training rows) and n (IVF: ten rounds of k-means, then one pass);
n·log2(n) (HNSW). Recall: a straight line in log2(n), for each effort. Coefficients are least squares of relative errors
and never negative. A law is first fitted without the largest size, and its error there is reported; the extrapolation
then uses all sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from large_build import Kind, count_cells
from scipy.optimize import nnls

from forage_retriever.search.memory import count_training_rows

Row = dict[str, Any]
Features = dict[str, float]
_KMEANS_ROUNDS = 10


@dataclass(frozen=True)
class Law:
    """A fitted law.

    Attributes:
        coefficients: seconds for each unit of a feature.
        error: of the law without the largest size, there: predicted over measured, less one; the worst effort's.
    """

    coefficients: Features
    error: float

    def predict(self, features: Features) -> float:
        return sum(self.coefficients[name] * amount for name, amount in features.items())


def list_search_features(kind: Kind, passages: int, effort: int) -> Features:
    """What the seconds of a search are made of."""
    if kind.is_graph:
        return {"base": 1, "step": effort * math.log2(passages)}
    if kind.has_cells:
        cells = count_cells(passages)
        return {"base": 1, "cell": cells, "code": passages * min(effort, cells) / cells}
    return {"base": 1, "passage": passages}


def list_build_features(kind: Kind, passages: int) -> Features:
    """What the CPU seconds of building are made of."""
    if kind.is_graph:
        return {"link": passages * math.log2(passages)}
    if kind.has_cells:
        cells = count_cells(passages)
        rows = min(count_training_rows(cells), passages)
        return {"passage": passages, "product": cells * (passages + _KMEANS_ROUNDS * rows)}
    return {"passage": passages}


def fit_law(rows: Sequence[tuple[int, Features, float]]) -> Law:
    """Fit (passages, features, seconds), at least two sizes of them."""
    largest = max(passages for passages, _, _ in rows)
    partial = _fit([row for row in rows if row[0] < largest])
    checked = [partial.predict(features) / seconds - 1 for passages, features, seconds in rows if passages == largest]
    return Law(_fit(rows).coefficients, max(checked, key=abs))


def _fit(rows: Sequence[tuple[int, Features, float]]) -> Law:
    names = list(rows[0][1])
    seconds = np.array([row[2] for row in rows])
    matrix = np.array([[row[1][name] for name in names] for row in rows]) / seconds[:, None]
    scale = np.linalg.norm(matrix, axis=0)
    solved = nnls(matrix / scale, np.ones(len(rows)))[0] / scale
    return Law(dict(zip(names, map(float, solved), strict=True)), 0.0)


def fit_search(kind: Kind, results: dict[int, Row], column: str) -> Law:
    """The law of "single_s" or "batch_s", from the results of a type by size."""
    rows = [
        (passages, list_search_features(kind, passages, row["effort"]), row[column])
        for passages, result in results.items()
        for row in result["rows"]
    ]
    return fit_law(rows)


def fit_build(kind: Kind, results: dict[int, Row]) -> Law:
    """The law of the CPU seconds of building."""
    return fit_law(
        [(size, list_build_features(kind, size), max(row["build_cpu_s"], 1e-3)) for size, row in results.items()]
    )


def fit_recall(results: dict[int, Row], effort: int, column: str = "recall_3") -> tuple[Callable[[int], float], float]:
    """Recall by size at an effort, at most 1, and the error of its law at the largest size."""
    points = [
        (math.log2(passages), row[column])
        for passages, result in sorted(results.items())
        for row in result["rows"]
        if row["effort"] == effort
    ]
    error = _draw_line(points[:-1])(points[-1][0]) - points[-1][1]
    line = _draw_line(points)
    return lambda passages: min(1.0, max(0.0, line(math.log2(passages)))), error


def _draw_line(points: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    if len(points) == 1:
        return lambda at: points[0][1]
    slope, start = np.polyfit(*zip(*points, strict=True), 1)
    return lambda at: float(start + slope * at)
