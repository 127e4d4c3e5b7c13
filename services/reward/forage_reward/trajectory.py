"""The input of a reward: a finished trajectory as spans with one author each, and its ground truth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

CHAT_END_OF_TURN = "<|im_end|>"
"""Stripped in addition to the tokenizer's own end-of-turn text."""

_PLAIN_ASSISTANT = "Assistant:"


class Role(StrEnum):
    """Who wrote a span; `OPENING` is what the chat template wrote in the model's name, see `join_opening`."""

    PROMPT = "prompt"
    OPENING = "opening"
    MODEL = "model"
    ENV = "env"


class Span(NamedTuple):
    """A stretch of text with one author."""

    role: Role
    text: str


def join_opening(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Make what the chat template wrote in the model's name the beginning of the model's own span that follows it."""
    joined: list[Span] = []
    opening = ""
    for role, text in spans:
        if role is Role.OPENING:
            opening += text
        elif role is Role.MODEL:
            joined.append(Span(role, opening + text))
            opening = ""
        else:
            joined.append(Span(role, text))
    return tuple(joined)


class Action(StrEnum):
    """The kind of action that a generation contains."""

    INVALID = "invalid"
    SEARCH = "search"
    ANSWER = "answer"


@dataclass(frozen=True)
class Turn:
    """One generation's action. `content` is the query or the answer; `answered` is true for a search that was
    executed and whose retrieval succeeded."""

    action: Action
    content: str = ""
    answered: bool = False


@dataclass(frozen=True)
class GroundTruth:
    """Accepted answers, or a countdown problem."""

    targets: tuple[str, ...] = ()
    countdown_target: int | None = None
    countdown_numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class TrajectoryView:
    """The spans of one trajectory in order.

    Attributes:
        end_of_turn: the tokenizer's end-of-turn text, if known.
        turns: the action of each generation, if the sender knows it; otherwise `turns.read_turns` parses the spans.
    """

    spans: tuple[Span, ...]
    end_of_turn: str = ""
    turns: tuple[Turn, ...] = ()

    def texts(self, role: Role) -> list[str]:
        """The texts of one author, in order. Adjacent spans of the same author are one text."""
        return list(self._texts.get(role, ()))

    @cached_property
    def _texts(self) -> dict[Role, list[str]]:
        """Texts by author, cached because several rewards and the canaries read the same view."""
        texts: dict[Role, list[str]] = {}
        last = None
        for role, text in self.spans:
            if role is last:
                texts[role][-1] += text
            else:
                texts.setdefault(role, []).append(text)
            last = role
        return texts

    @property
    def assistant_part(self) -> str:
        """All text after the prompt, without one end-of-turn marker at its very end."""
        return self.strip_end_of_turn("".join(span.text for span in self.spans if span.role is not Role.PROMPT))

    def strip_end_of_turn(self, text: str) -> str:
        """Remove one end-of-turn marker from the very end of a text."""
        # White space after the marker is irrelevant to the format, so it must not hide the marker.
        body = text.rstrip()
        for marker in (self.end_of_turn, CHAT_END_OF_TURN):
            if marker and body.endswith(marker):
                return body.removesuffix(marker)
        return text

    @property
    def has_role_marker(self) -> bool:
        """Whether the prompt opens an assistant turn; one that ends in a plain "Assistant:" does not.

        Prompts without a chat template end that way, and no format can be valid after them.
        """
        return not "".join(self.texts(Role.PROMPT)).rstrip().endswith(_PLAIN_ASSISTANT)
