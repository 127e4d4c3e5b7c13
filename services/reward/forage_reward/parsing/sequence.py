"""The format of a search trajectory: thoughts, searches with their observations, one answer, in this order.

A table-driven state machine over the eight tags. Source: the state machine of Search-R1's format reward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from forage_runtime.text.tags import CLOSE, OPEN, Tag

MAX_STEPS = 10_000
"""Tags and texts of a sequence; a longer one is invalid."""

_EXCERPT = 80


class State(StrEnum):
    """The states of the format."""

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
"""Every allowed transition; any other tag in a state violates the format."""

TEXT_ALLOWED = frozenset({State.IN_THINK, State.IN_SEARCH, State.IN_INFORMATION, State.IN_ANSWER})
"""States inside a pair of tags. Between pairs only white space is allowed."""

_TAG = re.compile("</?(?:" + "|".join(Tag) + ")>")


@dataclass(frozen=True)
class SequenceResult:
    """Whether a format is valid, its last state and, where it is not valid, the tag or text that violates it."""

    valid: bool
    state: State
    offending: str
    reason: str


class Step(NamedTuple):
    """One tag or text and the states around it; `after` is None where it violates the format."""

    token: str
    before: State
    after: State | None


def is_valid_sequence(text: str) -> SequenceResult:
    """Check the assistant part of a trajectory, without its end-of-turn marker."""
    for tag in Tag:
        opened, closed = text.count(OPEN[tag]), text.count(CLOSE[tag])
        if opened != closed:
            offending = OPEN[tag] if opened > closed else CLOSE[tag]
            return SequenceResult(False, State.START, offending, f"{opened} {OPEN[tag]} but {closed} {CLOSE[tag]}")
    state = State.START
    for count, step in enumerate(walk(text)):
        if step.after is None:
            token = step.token.strip()[:_EXCERPT]
            quoted = token if _TAG.fullmatch(token) else f"text {token!r}"
            return SequenceResult(False, state, token, f"{quoted} may not come in state {state}")
        if count > MAX_STEPS:
            return SequenceResult(False, state, "", f"the sequence has more than {MAX_STEPS} tags and texts")
        state = step.after
    if state is not State.END:
        return SequenceResult(False, state, "", f"the sequence ends in state {state}, without a complete answer")
    return SequenceResult(True, state, "", "the format is valid")


def walk(text: str) -> Iterator[Step]:
    """Yield every tag and every text that is not white space, up to the first that violates the format."""
    state = State.START
    position = 0
    while True:
        tag = _TAG.search(text, position)
        end = tag.start() if tag else len(text)
        between = text[position:end]
        if between and not between.isspace():
            step = Step(between, state, state if state in TEXT_ALLOWED else None)
            yield step
            if step.after is None:
                return
        if tag is None:
            return
        step = Step(tag[0], state, TRANSITIONS.get((state, tag[0])))
        yield step
        if step.after is None:
            return
        state, position = step.after, tag.end()
