"""Made vectors of 768 dimensions, as many as wanted, with the structure of real ones, and questions about them.

A vector is the sum of six draws: one for each level of a tree of themes, one of its article, and its own. Each has its
share of the variance and the same spectrum of principal components, `SPECTRUM`. A question has a drawn cosine to the
passage that answers it, and what it has beside that points a little towards the next passage.

Measured, on MiniLM's vectors (384 dimensions) of 15,190 passages, most of them Wikipedia's, and 2,803 questions: the
spectrum, and the cosine between question and answer. The shares were chosen so that as many made vectors (right) are as
hard to search as those (left), which `large_compare.py` measures:

    cosine of question and 1st, 3rd, 10th, 100th passage   .66 .45 .36 .24   .65 .47 .37 .22
    top 3 found by IVF246, nprobe 1, 4, 8                  .52 .77 .85       .63 .77 .83
    top 3 found by HNSW8, efSearch 10, 20, 40              .77 .86 .91       .65 .80 .88
    top 3 among the best 3, 10, 40 of PQ{d/4}x4fs          .76 .96 1.0       .80 .99 1.0

Assumed: that components beyond the 384th go on falling (a spectrum stretched to 768 has twice the effective dimensions,
and made search easier than it is among real vectors: IVF256 found .98 with nprobe 8); that a larger corpus has more
articles on the same themes, whose tree has levels fine enough for it (with themes that grow in number instead, recall
falls with size faster than it does among real vectors); articles of 6.5 passages, as wiki-18 has. No vector is a
near-copy of another: its own draw is 0.4 of it. Passages of an article lie side by side, so the first n vectors are a
corpus of n passages.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forage_retriever.search.vectors import map_vectors

Vectors = NDArray[np.float32]
DIMENSION = 768
SPECTRUM = {
    1: 0.0365,
    2: 0.0298,
    4: 0.0192,
    8: 0.0135,
    16: 0.0092,
    32: 0.0069,
    64: 0.00466,
    96: 0.00337,
    128: 0.00258,
    192: 0.00146,
    256: 0.00059,
    320: 0.00022,
    384: 0.00012,
    768: 0.00002,
}
"""Share of the variance by rank of the principal component; between ranks, interpolated along logarithms."""

THEMES = ((64, 0.08), (512, 0.10), (4096, 0.14), (32_768, 0.12))
"""Themes of each level, and the share of the variance that they explain."""

ARTICLE, ARTICLE_SHARE, OWN_SHARE = 6.5, 0.16, 0.40
"""Mean passages of an article."""

ANSWER = (0.65, 0.12)
"""Mean and deviation of the cosine between a question and the passage that answers it."""

ASIDE = 0.05
"""Share of a question, beside the passage that answers it, that points towards the next passage."""

_BLOCK = 65_536
_SEED = 20


class Maker:
    """Draws the same vectors and questions whenever it is given the same dimension.

    Attributes:
        dimension: of the vectors.
    """

    def __init__(self, dimension: int = DIMENSION) -> None:
        self.dimension = dimension
        chance = np.random.default_rng(_SEED)
        # Components lie along random axes, as a trained model's do, so that no coordinate has most of the variance.
        rotation = np.linalg.qr(chance.standard_normal((dimension, dimension)))[0]
        self._mix = (np.sqrt(find_spectrum(dimension))[:, None] * rotation).astype(np.float32)
        self._themes = np.zeros((1, dimension), np.float32)
        for count, share in THEMES:
            self._themes = np.repeat(self._themes, count // len(self._themes), axis=0)
            self._themes += self._draw(chance, share, count)

    def draw_block(self, number: int, count: int) -> Vectors:
        """The first vectors [count, dimension], of unit length, of block `number`."""
        chance, of_articles, own = (np.random.default_rng((_SEED, number, part)) for part in range(3))
        articles = np.cumsum(chance.random(_BLOCK) < 1 / ARTICLE)[:count]
        parts = self._themes[chance.integers(0, len(self._themes), _BLOCK)[: articles[-1] + 1]]
        parts += self._draw(of_articles, ARTICLE_SHARE, len(parts))
        vectors = self._draw(own, OWN_SHARE, count)
        vectors += parts[articles]
        return normalize(vectors @ self._mix)

    def draw_questions(self, passages: Vectors, nexts: Vectors) -> Vectors:
        """A question [n, dimension] for each of some passages, with the passages next to them."""
        chance = np.random.default_rng((_SEED, _SEED, len(passages)))
        beside = self._draw(chance, 1 - ASIDE, len(passages)) @ self._mix + np.float32(np.sqrt(ASIDE)) * nexts
        beside -= np.sum(beside * passages, axis=1, keepdims=True) * passages
        cosine = np.clip(chance.normal(*ANSWER, (len(passages), 1)), 0.3, 0.95).astype(np.float32)
        return normalize(cosine * passages + np.sqrt(1 - cosine**2) * normalize(beside))

    def _draw(self, chance: np.random.Generator, weight: float, count: int) -> Vectors:
        """Components [count, dimension] before they are mixed."""
        drawn: Vectors = chance.standard_normal((count, self.dimension), np.float32)
        drawn *= np.float32(np.sqrt(weight))
        return drawn


def find_spectrum(dimension: int) -> NDArray[np.float64]:
    """Variances [dimension] of the principal components, greatest first; their sum is 1."""
    ranks = np.log(np.arange(dimension) + 1)
    shares = np.exp(np.interp(ranks, np.log(list(SPECTRUM)), np.log(list(SPECTRUM.values()))))
    return np.asarray(shares / shares.sum())


def make_vectors(file: Path, passages: int, report: Callable[[int], None]) -> Vectors:
    """Vectors [passages, DIMENSION], mapped from the file, which is written block by block if it is missing."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".tmp")
        maker = Maker()
        with temporary.open("wb") as out:
            header = {"descr": "<f4", "fortran_order": False, "shape": (passages, DIMENSION)}
            np.lib.format.write_array_header_1_0(out, header)
            for number, begin in enumerate(range(0, passages, _BLOCK)):
                out.write(maker.draw_block(number, min(_BLOCK, passages - begin)).tobytes())
                report(min(begin + _BLOCK, passages))
        temporary.rename(file)
    return map_vectors(file)


def normalize(vectors: Vectors) -> Vectors:
    """The same vectors of unit length."""
    lengths: Vectors = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / lengths, np.float32)
