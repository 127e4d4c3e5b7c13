"""One generation: where it ends, and what it asks for."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forage_common.v1.trajectory_pb2 import ActionKind

SEARCH_END = "</search>"
ANSWER_END = "</answer>"
STOP = (SEARCH_END, ANSWER_END)
_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_KINDS = {"search": ActionKind.ACTION_KIND_SEARCH, "answer": ActionKind.ACTION_KIND_ANSWER}


@dataclass(frozen=True)
class Cut:
    """The part of a generation that counts.

    Attributes:
        length: tokens kept; the last one completes the stop string and may run past it.
        text: what these tokens say, ending exactly with the stop string where there is one.
        stopped: whether a stop string ended it.
    """

    length: int
    text: str
    stopped: bool


def cut(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Cut:
    """Cut at the first </search>, else at the first </answer>, on a border between tokens."""
    text = decode(token_ids)
    stop = next((tag for tag in STOP if tag in text), None)
    if stop is None:
        return Cut(len(token_ids), text, stopped=False)
    low, high = 1, len(token_ids)
    while low < high:  # the shortest prefix that says the whole stop string
        middle = (low + high) // 2
        if stop in decode(token_ids[:middle]):
            high = middle
        else:
            low = middle + 1
    prefix = decode(token_ids[:low])
    return Cut(low, prefix[: prefix.index(stop) + len(stop)], stopped=True)


@dataclass(frozen=True)
class Action:
    """What a generation asks for; `content` is the query or the answer, stripped."""

    kind: ActionKind.ValueType
    content: str


def parse_action(text: str) -> Action:
    """The first complete <search> or <answer> of a generation; none of them is an invalid action."""
    found = _ACTION.search(text)
    if found is None:
        return Action(ActionKind.ACTION_KIND_INVALID, "")
    return Action(_KINDS[found[1]], found[2].strip())
