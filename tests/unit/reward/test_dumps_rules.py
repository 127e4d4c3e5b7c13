"""Dumps of several assistant turns: what follows the first marker is the policy's and the environment's."""

from __future__ import annotations

from forage_reward.parsing.raw_text import split_spans
from forage_reward.trajectory import Role, Span


def test_a_dump_begins_at_its_first_assistant_turn() -> None:
    marker = "<|im_start|>assistant"
    text = f"Q{marker}\nfirst<information>seen</information>{marker}\nsecond"
    assert split_spans(text) == (
        Span(Role.PROMPT, f"Q{marker}"),
        Span(Role.MODEL, "\nfirst"),
        Span(Role.ENV, "<information>seen</information>"),
        Span(Role.MODEL, f"{marker}\nsecond"),
    )
