"""Splitting a trajectory's text for a page: by author, by tag, and at marks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forage_proto.v1.trajectory_pb2 import Role, Span
from forage_runtime.text.enums import name_value

_TAG = re.compile(r"<(/?)([A-Za-z][\w-]*)>")


@dataclass(frozen=True)
class Mark:
    """A marked position in the text.

    Attributes:
        at: characters before it, counted over the texts of all spans, the prompt included.
        label: a word or two, shown there.
        title: a sentence, shown as a tooltip.
        strength: 0 to 1, strength of its colour; None without colour.
    """

    at: int
    label: str
    title: str = ""
    strength: float | None = None


@dataclass(frozen=True)
class Piece:
    """A tag, a text within the tag `within` ("" outside of any), or a mark."""

    text: str = ""
    within: str = ""
    is_tag: bool = False
    mark: Mark | None = None


@dataclass
class Block:
    """A span: its author (see `name_author`) and its pieces."""

    role: str
    pieces: list[Piece] = field(default_factory=list)


OPENING = "opening"
"""The author of what the chat template wrote in the policy's name."""


def name_author(span: Span) -> str:
    """Name the author of a span: "prompt", "opening", "model" or "env"."""
    return OPENING if span.opening else name_value(Role, span.role).lower()


def split_spans(spans: Sequence[Span | Mapping[str, Any]], marks: Sequence[Mark] = ()) -> list[Block]:
    """Split the spans of a trajectory (messages, or rows with `role` and `text`) at tags and marks.

    A tag that an opening leaves open goes on in the policy's text.
    A mark between two spans closes the first; one beyond the end closes the last.
    """
    waiting = sorted(marks, key=lambda mark: mark.at)
    found: list[Block] = []
    begin, within = 0, ""
    for span in spans:
        role, text = _read_span(span)
        end = begin + len(text)
        here = [mark for mark in waiting if mark.at <= end]
        waiting = waiting[len(here) :]
        places = [(max(0, mark.at - begin), mark) for mark in here]
        found.append(Block(role, list(_split_text(text, places, within))))
        last = [tag for tag in _TAG.finditer(text)][-1:] if role == OPENING else []
        within = last[0][2] if last and not last[0][1] else ""
        begin = end
    if found:
        found[-1].pieces += [Piece(mark=mark) for mark in waiting]
    return found


def _read_span(span: Span | Mapping[str, Any]) -> tuple[str, str]:
    if isinstance(span, Span):
        return name_author(span), span.text
    return str(span["role"]), str(span["text"])


def _split_text(text: str, marks: Sequence[tuple[int, Mark]], within: str) -> Iterator[Piece]:
    """Marks within a tag come before it."""
    place, waiting = 0, list(marks)
    for tag in [*_TAG.finditer(text), None]:
        begin, end = tag.span() if tag else (len(text), len(text))
        while waiting and (waiting[0][0] < end or tag is None):
            at, mark = waiting.pop(0)
            cut = max(place, min(at, begin))
            if cut > place:
                yield Piece(text[place:cut], within)
            yield Piece(mark=mark)
            place = cut
        if begin > place:
            yield Piece(text[place:begin], within)
        if tag:
            within = "" if tag[1] else tag[2]
            yield Piece(tag[0], tag[2], is_tag=True)
        place = end
