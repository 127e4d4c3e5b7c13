"""Normalisation of answers, and comparison of answers and evidence with the ground truth.

Normalisation is exactly that of SQuAD's evaluation, so that metrics are comparable with published ones: there is no
Unicode folding, and "12.0" equals "120". It leaves nothing of "A", "the" or "?!": such a text matches nothing, also not
another of them, or an answer without words would be right.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence

MAX_ANSWER = 20_000
"""Characters. A longer answer is wrong, which bounds the cost of a comparison."""

MAX_EVIDENCE = 500_000
"""Characters of observations that are searched for an accepted answer; the rest is ignored."""

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = frozenset({"a", "an", "the"})
_ARTICLE = re.compile(r"\b(a|an|the)\b")


def normalize_answer(value: object) -> str:
    """Lower the case, remove ASCII punctuation and articles, collapse white space; None is "", others their `str`."""
    text = ("" if value is None else str(value)).lower().translate(_PUNCTUATION)
    words = text.split()
    if "".join(words).isalnum():  # words are bounded by blanks only: twice as fast as the pattern
        return " ".join([word for word in words if word not in _ARTICLES])
    return " ".join(_ARTICLE.sub(" ", text).split())


def em_check(prediction: object, golds: str | Iterable[object]) -> bool:
    """Whether the prediction equals any gold, both normalised. A `str` is one gold, not its characters."""
    if _is_too_long(prediction):
        return False
    normal = normalize_answer(prediction)
    return any(normalize_answer(gold) == normal for gold in _as_list(golds)) if normal else False


def subem_check(prediction: object, golds: str | Iterable[object]) -> bool:
    """Whether the prediction contains any gold, both normalised."""
    if _is_too_long(prediction):
        return False
    normal = normalize_answer(prediction)
    return any(needle in normal for needle in map(normalize_answer, _as_list(golds)) if needle)


def f1(prediction: object, golds: str | Iterable[object]) -> float:
    """Harmonic mean of precision and recall over normalised words, the highest over all golds; 0 without golds.

    If a side has no words: 0.
    """
    if _is_too_long(prediction):
        return 0.0
    words = Counter(normalize_answer(prediction).split())
    return max((_f1(words, Counter(normalize_answer(gold).split())) for gold in _as_list(golds)), default=0.0)


def _f1(words: Counter[str], gold: Counter[str]) -> float:
    if not words or not gold:
        return 0.0
    return 2 * (words & gold).total() / (words.total() + gold.total())


def is_retrieval_correct(observations: Sequence[str], golds: str | Iterable[object]) -> bool:
    """Whether an observation contains a gold, both normalised. Golds that normalise to "" never count."""
    needles = [needle for gold in _as_list(golds) if (needle := normalize_answer(gold))]
    if not needles:
        return False
    remaining = MAX_EVIDENCE
    for text in observations:
        evidence = normalize_answer(text[:remaining])
        if any(needle in evidence for needle in needles):
            return True
        remaining -= len(text)
        if remaining <= 0:
            break
    return False


def _is_too_long(prediction: object) -> bool:
    return isinstance(prediction, str) and len(prediction) > MAX_ANSWER


def _as_list(golds: str | Iterable[object]) -> Iterable[object]:
    return [golds] if isinstance(golds, str) else golds
