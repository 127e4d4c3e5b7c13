"""The format of a search trajectory: thoughts, searches with their observations, one answer, in this order.

A table-driven machine over the eight tags. Source: the state machine of Search-R1's format reward.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from forage_reward.tags import CLOSE, OPEN, Tag

_EXCERPT = 80


class State(StrEnum):
    """Where in the sequence a reader is."""

    START = "start"
    IN_THINK = "in_think"
    AFTER_THINK = "after_think"
    IN_SEARCH = "in_search"
    AFTER_SEARCH = "after_search"
    IN_INFORMATION = "in_information"
    INFORMATION = "information"
    IN_ANSWER = "in_answer"
    END = "end"


TRANSITIONS: dict[tuple[State, str], State] = {
    (State.START, OPEN[Tag.THINK]): State.IN_THINK,
    (State.IN_THINK, CLOSE[Tag.THINK]): State.AFTER_THINK,
    (State.AFTER_THINK, OPEN[Tag.SEARCH]): State.IN_SEARCH,
    (State.AFTER_THINK, OPEN[Tag.ANSWER]): State.IN_ANSWER,
    (State.IN_SEARCH, CLOSE[Tag.SEARCH]): State.AFTER_SEARCH,
    (State.AFTER_SEARCH, OPEN[Tag.INFORMATION]): State.IN_INFORMATION,
    (State.IN_INFORMATION, CLOSE[Tag.INFORMATION]): State.INFORMATION,
    (State.INFORMATION, OPEN[Tag.THINK]): State.IN_THINK,
    (State.IN_ANSWER, CLOSE[Tag.ANSWER]): State.END,
}
"""Every allowed step; any other tag in any state is an offence."""

TEXT_ALLOWED = frozenset({State.IN_THINK, State.IN_SEARCH, State.IN_INFORMATION, State.IN_ANSWER})
"""States inside a pair of tags. Between pairs only blank text may stand."""

_TAG = re.compile("(" + "|".join(re.escape(tag) for tag in (*OPEN.values(), *CLOSE.values())) + ")")


@dataclass(frozen=True)
class SequenceResult:
    """Verdict on a format: the state it ended in and, where it broke, the tag or text that broke it."""

    valid: bool
    state: State
    offending: str
    reason: str


def is_valid_sequence(text: str) -> SequenceResult:
    """Judge the assistant part of a trajectory, end-of-turn marker already stripped."""
    for tag in Tag:
        opened, closed = text.count(OPEN[tag]), text.count(CLOSE[tag])
        if opened != closed:
            offending = OPEN[tag] if opened > closed else CLOSE[tag]
            return SequenceResult(False, State.START, offending, f"{opened} {OPEN[tag]} but {closed} {CLOSE[tag]}")
    state = State.START
    for part in _TAG.split(text):
        if _TAG.fullmatch(part):
            following = TRANSITIONS.get((state, part))
            if following is None:
                return SequenceResult(False, state, part, f"{part} may not come in state {state}")
            state = following
        elif part.strip() and state not in TEXT_ALLOWED:
            excerpt = part.strip()[:_EXCERPT]
            return SequenceResult(False, state, excerpt, f"text {excerpt!r} may not come in state {state}")
    if state is not State.END:
        return SequenceResult(False, state, "", f"the sequence ends in state {state}, without a complete answer")
    return SequenceResult(True, state, "", "the format is valid")
