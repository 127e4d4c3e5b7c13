"""Texts of trajectories are split at tags and marks."""

from __future__ import annotations

import pytest

from forage_proto.v1.trajectory_pb2 import Role, Span
from forage_records.spans import Block, Mark, split_spans


def read_block(block: Block) -> list[str]:
    return [f"[{piece.mark.label}]" if piece.mark else f"{piece.within}:{piece.text}" for piece in block.pieces]


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ([], ["think:<think>", "think:abc", "think:</think>", ":x"]),
        ([8], ["think:<think>", "think:a", "[8]", "think:bc", "think:</think>", ":x"]),
        ([10, 7, 10], ["think:<think>", "[7]", "think:abc", "[10]", "[10]", "think:</think>", ":x"]),
        ([0, 3], ["[0]", "[3]", "think:<think>", "think:abc", "think:</think>", ":x"]),
        ([-5, 19, 99], ["[-5]", "think:<think>", "think:abc", "think:</think>", ":x", "[19]", "[99]"]),
        ([18], ["think:<think>", "think:abc", "think:</think>", "[18]", ":x"]),
    ],
)
def test_marks_split_the_text_at_their_positions(marks: list[int], expected: list[str]) -> None:
    (block,) = split_spans([{"role": "model", "text": "<think>abc</think>x"}], [Mark(at, str(at)) for at in marks])
    assert read_block(block) == expected


def test_marks_count_over_all_spans_and_spans_may_be_messages() -> None:
    spans = [Span(role=Role.ROLE_PROMPT, text="ab"), Span(role=Role.ROLE_ENV, text="cd")]
    one, other = split_spans(spans, [Mark(2, "edge"), Mark(3, "in")])
    assert (one.role, other.role) == ("prompt", "env")
    assert (read_block(one), read_block(other)) == ([":ab", "[edge]"], [":c", "[in]", ":d"])


def test_a_thought_that_the_template_opened_goes_on_in_the_policys_text() -> None:
    spans = [
        Span(role=Role.ROLE_PROMPT, text="ask"),
        Span(role=Role.ROLE_PROMPT, text="<think>\n", opening=True),
        Span(role=Role.ROLE_MODEL, text="abc</think>x"),
    ]
    prompt, opening, policy = split_spans(spans)
    assert (prompt.role, opening.role, policy.role) == ("prompt", "opening", "model")
    assert read_block(opening) == ["think:<think>", "think:\n"]
    assert read_block(policy) == ["think:abc", "think:</think>", ":x"]
    rows = [{"role": "opening", "text": "<think></think>"}, {"role": "model", "text": "abc"}]
    assert read_block(split_spans(rows)[1]) == [":abc"]
