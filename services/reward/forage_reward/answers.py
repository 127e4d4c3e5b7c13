"""Answers and evidence: how texts are normalised, compared with the truth and found in a trajectory.

Normalisation is that of SQuAD's evaluation, kept as it is so that figures compare with published ones: it
knows no Unicode folding, and "12.0" equals "120".
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Sequence

from forage_reward.tags import Tag, blocks
from forage_reward.trajectory import Role, TrajectoryView

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")


def normalize_answer(value: object) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces; None is "", others are their `str`."""
    text = "" if value is None else str(value)
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def em_check(prediction: object, golds: str | Iterable[object]) -> bool:
    """Whether the prediction equals any gold, both normalised. A `str` is one gold, not its characters."""
    normal = normalize_answer(prediction)
    return any(normalize_answer(gold) == normal for gold in _each(golds))


def extract_solution(view: TrajectoryView) -> str | None:
    """The last answer that the model itself wrote, stripped; None where there is none. "" is an answer."""
    found = [answer for text in view.texts(Role.MODEL) for answer in blocks(text, Tag.ANSWER)]
    return found[-1].strip() if found else None


def observations(view: TrajectoryView) -> list[str]:
    """The contents of every `<information>` block that the environment wrote; feedback is none."""
    return [block for text in view.texts(Role.ENV) for block in blocks(text, Tag.INFORMATION)]


def is_retrieval_correct(found: Sequence[str], golds: str | Iterable[object]) -> bool:
    """Whether a gold stands in an observation, both normalised. Golds that normalise to "" never do."""
    needles = [needle for gold in _each(golds) if (needle := normalize_answer(gold))]
    return bool(needles) and any(needle in text for text in map(normalize_answer, found) for needle in needles)


def _each(golds: str | Iterable[object]) -> Iterable[object]:
    return [golds] if isinstance(golds, str) else golds
