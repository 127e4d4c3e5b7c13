"""Fusion of rankings on questions with known passages: every weight and `rrf_k` of a grid, from one search of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forage_retriever.command.questions import GoldQuestion
from forage_retriever.index import load
from forage_retriever.search.hybrid import TITLE_WEIGHT, choose_depth, fuse_rankings, read_weights
from forage_runtime.settings import RetrievalMode, RetrieverSettings

TOPK = 10
RRF_K = (1, 2, 5, 10, 20, 40, 60, 100)
_SHARES = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
WEIGHTS = (*((1.0, share) for share in _SHARES), (1.0, 1.0), *((share, 1.0) for share in reversed(_SHARES)))
"""Of BM25 and dense. Together they weigh less than half of an exact title, which stays first."""

PARTS = (load.TITLE, RetrievalMode.BM25, RetrievalMode.DENSE)
_BATCH = 32
_RESAMPLES = 4000
_GAIN = 1 / np.log2(np.arange(2, TOPK + 2))


@dataclass(frozen=True)
class Fusion:
    """Settings of hybrid search."""

    title_weight: float
    bm25_weight: float
    dense_weight: float
    rrf_k: int

    @classmethod
    def from_settings(cls, settings: RetrieverSettings) -> Fusion:
        return cls(*read_weights(settings), settings.rrf_k)

    def fuse(self, rankings: Sequence[Sequence[int]]) -> list[int]:
        """The best rows of a question's rankings: of titles, BM25 and dense."""
        weights = (self.title_weight, self.bm25_weight, self.dense_weight)
        return [hit.row for hit in fuse_rankings(rankings, weights, TOPK, self.rrf_k)]


@dataclass(frozen=True)
class Judged:
    """A question, the rows that each of `PARTS` ranks for it, and the rows that answer it.

    Attributes:
        missing: gold passages that are not in the corpus, or that no ranking has found.
    """

    question: GoldQuestion
    rankings: tuple[list[int], ...]
    gold: frozenset[int]
    missing: int


def list_fusions() -> list[Fusion]:
    """The grid."""
    return [Fusion(TITLE_WEIGHT, bm25, dense, k) for bm25, dense in WEIGHTS for k in RRF_K]


def judge(
    index: load.Index, questions: Sequence[GoldQuestion], progress: Callable[[int], None] = lambda done: None
) -> list[Judged]:
    """Search each of `PARTS` with all questions; `progress` gets the number of questions done."""
    judged: list[Judged] = []
    depth = choose_depth(TOPK)
    for begin in range(0, len(questions), _BATCH):
        own = questions[begin : begin + _BATCH]
        texts = [question.text for question in own]
        found = [index.searchers[part].search(texts, depth) for part in PARTS]
        for question, hits in zip(own, zip(*found, strict=True), strict=True):
            rankings = tuple([hit.row for hit in ranking] for ranking in hits)
            rows = {row for ranking in rankings for row in ranking}
            gold = frozenset(row for row in rows if index.corpus.ids[row] in question.gold_ids)
            judged.append(Judged(question, rankings, gold, len(question.gold_ids) - len(gold)))
        progress(len(judged))
    return judged


def score_ranking(rows: Sequence[int], gold: frozenset[int], missing: int) -> float:
    """nDCG@10: passages that answer a question count the more the higher they are; 1 is the best order there is."""
    gained = sum(float(_GAIN[place]) for place, row in enumerate(rows[:TOPK]) if row in gold)
    return gained / float(_GAIN[: min(TOPK, len(gold) + missing)].sum())


def score_fusion(judged: Iterable[Judged], fusion: Fusion) -> NDArray[np.float64]:
    """nDCG@10 of each question."""
    return np.array([score_ranking(fusion.fuse(one.rankings), one.gold, one.missing) for one in judged])


def split_questions(questions: Sequence[GoldQuestion], seed: int = 0) -> tuple[list[GoldQuestion], list[GoldQuestion]]:
    """Two random halves, of every source."""
    generator = np.random.default_rng(seed)
    order = sorted(generator.permutation(len(questions)).tolist(), key=lambda number: questions[number].source)
    return [questions[number] for number in order[::2]], [questions[number] for number in order[1::2]]


def bootstrap(differences: NDArray[np.float64], seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the mean of paired differences, by resampling questions."""
    generator = np.random.default_rng(seed)
    means = [
        float(differences[generator.integers(0, len(differences), len(differences))].mean()) for _ in range(_RESAMPLES)
    ]
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))
