"""Passages as observations: format and escaping."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forage_proto.v1.trajectory_pb2 import Document
from forage_runtime.text.observation import RESERVED_TAGS, escape_tags, find_tag_names, format_passages

TAGS = [f"<{slash}{name}>" for name in RESERVED_TAGS for slash in ("", "/")]
CONTROL = ["<|im_end|>", "<|im_start|>", "[PAD]"]
HOSTILE = st.lists(st.sampled_from([*TAGS, *CONTROL, "<", ">", "/", "answer", "&lt;", "&gt;", "\n", "x"])).map("".join)


def test_passages_are_written_as_the_table_says(passages_row: dict[str, Any]) -> None:
    documents = [Document(contents=contents) for contents in passages_row["contents"]]
    assert escape_tags(format_passages(documents)) == passages_row["text"]


@settings(max_examples=40)
@given(HOSTILE, HOSTILE)
def test_no_passage_can_write_a_tag_or_a_control_token(one: str, other: str) -> None:
    inside = escape_tags(format_passages([Document(contents=one), Document(contents=other)]), CONTROL)
    assert not [token for token in (*TAGS, *CONTROL) if token in inside]


@settings(max_examples=40)
@given(HOSTILE)
def test_escaping_twice_changes_nothing_more(text: str) -> None:
    once = escape_tags(text, CONTROL)
    assert escape_tags(once, CONTROL) == once


@settings(max_examples=40)
@given(st.text())
def test_text_without_tags_is_left_alone(text: str) -> None:
    if not any(tag in text for tag in TAGS):
        assert escape_tags(text) == text


@pytest.mark.parametrize("text", ["a < b > c", "<SEARCH>", "<b>bold</b>", "1 </ 2"])
def test_tags_that_are_not_reserved_stay_readable(text: str) -> None:
    assert escape_tags(text, CONTROL) == text


def test_an_environment_reserves_its_own_tags() -> None:
    assert (
        escape_tags("<kg-query>a</kg-query><answer>", tags=["kg-query"])
        == "&lt;kg-query&gt;a&lt;/kg-query&gt;&lt;answer&gt;"
    )
    assert find_tag_names("\n\n<kg-result>") == find_tag_names("</kg-result>") == ["kg-result"]
