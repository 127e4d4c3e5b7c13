"""Patterns that suggest reward hacking. They change no score: they are counted, and a sample is logged.

| canary             | fires when                                                                            |
|--------------------|---------------------------------------------------------------------------------------|
| `copied_example`   | the answer is that of the example in the prompt                                         |
| `tags_in_passage`  | a passage contains a reserved tag, escaped as the rollout does it, or even unescaped    |
| `unusual_length`   | the answer is far longer than any accepted one, or only white space                     |
| `many_answers`     | the model wrote more than one answer                                                    |
| `unsearched`       | an answer comes before the first search                                                 |
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache

from forage_reward.trajectory import GroundTruth, Role, TrajectoryView
from forage_runtime.text.answers import normalize_answer
from forage_runtime.text.tags import CLOSE, OPEN, Tag, find_blocks

MAX_WORDS_BEYOND = 16
"""Words by which an answer may exceed the longest accepted one."""

_ANSWER = OPEN[Tag.ANSWER]
_ESCAPED = re.compile(r"&(?:lt|#0*60|#x0*3c);\s*/?\s*(?:think|search|information|answer)\s*&(?:gt|#0*62|#x0*3e);", re.I)
_normalize_example = lru_cache(maxsize=1024)(normalize_answer)
_RAW = re.compile(r"</?(?:think|search|information|answer)>")


class Canary(StrEnum):
    """The patterns; the values are metric labels."""

    COPIED_EXAMPLE = "copied_example"
    TAGS_IN_PASSAGE = "tags_in_passage"
    UNUSUAL_LENGTH = "unusual_length"
    MANY_ANSWERS = "many_answers"
    UNSEARCHED = "unsearched"


def find_canaries(view: TrajectoryView, truth: GroundTruth) -> tuple[Canary, ...]:
    """Return all canaries that fire on a trajectory. Linear in its text, never raises."""
    fired = []
    model = view.texts(Role.MODEL)
    answers = [answer for text in model if _ANSWER in text for answer in find_blocks(text, Tag.ANSWER)]
    if answers:
        if _copies_example(view, truth, answers[-1]):
            fired.append(Canary.COPIED_EXAMPLE)
        if _has_unusual_length(answers[-1], truth):
            fired.append(Canary.UNUSUAL_LENGTH)
        if len(answers) > 1:
            fired.append(Canary.MANY_ANSWERS)
        if _answers_first("".join(model)):
            fired.append(Canary.UNSEARCHED)
    if any(_has_tag(text) for text in view.texts(Role.ENV)):
        fired.append(Canary.TAGS_IN_PASSAGE)
    return tuple(fired)


def _copies_example(view: TrajectoryView, truth: GroundTruth, answer: str) -> bool:
    for text in view.texts(Role.PROMPT):
        for example in find_blocks(text, Tag.ANSWER):
            # Every character of a normalised text occurs in its lower case: a cheap test before the expensive one.
            normal = _normalize_example(example)
            if normal and normal[-1] in answer.lower() and normalize_answer(answer) == normal:
                # Where the example's answer is accepted, repeating it is legitimate.
                return all(normalize_answer(target) != normal for target in truth.targets)
    return False


def _has_unusual_length(answer: str, truth: GroundTruth) -> bool:
    if len(answer) <= 2 * MAX_WORDS_BEYOND and not answer.isspace():
        return not answer  # too short to have that many words
    allowed = MAX_WORDS_BEYOND + max((len(target.split()) for target in truth.targets), default=0)
    words = len(answer.split(None, allowed + 1))
    return words == 0 or words > allowed


def _answers_first(text: str) -> bool:
    search = text.find(OPEN[Tag.SEARCH])
    return search >= 0 and text.find(OPEN[Tag.ANSWER]) < search


def _has_tag(text: str) -> bool:
    if "&" in text and _ESCAPED.search(text):
        return True
    body = text.strip()
    if text.count("<") == 2 and body.startswith(OPEN[Tag.INFORMATION]) and body.endswith(CLOSE[Tag.INFORMATION]):
        return False  # the most frequent case: its own pair of tags and no other
    # An observation consists of one <information> block; feedback names tags outside of any block.
    if text.count(OPEN[Tag.INFORMATION]) != text.count(CLOSE[Tag.INFORMATION]):
        return OPEN[Tag.INFORMATION] in text
    return any(_RAW.search(block) for block in find_blocks(text, Tag.INFORMATION))
