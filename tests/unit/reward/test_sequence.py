"""Every cell of the format's state machine, and texts written against it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage_reward.parsing.sequence import State, is_valid_sequence
from forage_runtime.text.tags import CLOSE, OPEN, Tag

DATA = Path(__file__).parents[2] / "data/reward/sequence.jsonl"
ROWS = [json.loads(line) for line in DATA.read_text().splitlines()]
TAGS = [*OPEN.values(), *CLOSE.values()]

# State → (a text that leads there, the tags that may follow, whether text may follow).
CELLS: dict[State, tuple[str, set[str], bool]] = {
    State.START: ("", {"<think>"}, False),
    State.IN_THINK: ("<think>", {"</think>"}, True),
    State.AFTER_THINK: ("<think>t</think>", {"<search>", "<answer>"}, False),
    State.IN_SEARCH: ("<think>t</think><search>", {"</search>"}, True),
    State.AFTER_SEARCH: ("<think>t</think><search>q</search>", {"<information>"}, False),
    State.IN_INFORMATION: ("<think>t</think><search>q</search><information>", {"</information>"}, True),
    State.INFORMATION: ("<think>t</think><search>q</search><information>d</information>", {"<think>"}, False),
    State.IN_ANSWER: ("<think>t</think><answer>", {"</answer>"}, True),
    State.END: ("<think>t</think><answer>a</answer>", set(), False),
}


def balance_tags(text: str) -> str:
    """Append the missing tags, so that there are as many opening as closing ones."""
    for tag in Tag:
        missing = text.count(OPEN[tag]) - text.count(CLOSE[tag])
        text += CLOSE[tag] * missing + OPEN[tag] * -missing
    return text


@pytest.mark.parametrize("row", ROWS)
def test_a_format_has_its_validity_last_state_and_violation(row: dict[str, Any]) -> None:
    result = is_valid_sequence(row["text"])
    assert (result.valid, result.state) == (row["valid"], row["state"])
    assert result.offending.startswith(row["offending"])
    assert bool(result.offending) == bool(row["offending"])


def test_the_table_of_cells_names_every_state() -> None:
    assert set(CELLS) == set(State)


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("state", State)
def test_only_the_tags_of_a_state_may_follow_it(state: State, tag: str) -> None:
    prefix, allowed, _ = CELLS[state]
    result = is_valid_sequence(balance_tags(prefix + tag))
    assert ((result.state, result.offending) == (state, tag)) == (tag not in allowed)


@pytest.mark.parametrize("state", State)
def test_text_is_allowed_only_inside_tags(state: State) -> None:
    prefix, _, text_allowed = CELLS[state]
    result = is_valid_sequence(balance_tags(prefix + " words "))
    assert ((result.state, result.offending) == (state, "words")) == (not text_allowed)


@pytest.mark.parametrize("blank", [" ", "\n\t", "\u00a0", "\u3000"])
@pytest.mark.parametrize("state", State)
def test_white_space_changes_nothing(state: State, blank: str) -> None:
    prefix, _, _ = CELLS[state]
    plain = is_valid_sequence(balance_tags(prefix))
    assert is_valid_sequence(balance_tags(prefix + blank)) == plain


def test_a_zero_width_space_is_text() -> None:
    result = is_valid_sequence("<think>t</think>\u200b<answer>a</answer>")
    assert (result.valid, result.offending) == (False, "\u200b")


@pytest.mark.parametrize("searches", [0, 1, 7])
def test_any_number_of_searches_is_valid(searches: int) -> None:
    turn = "<think>t</think>\n<search>q</search>\n\n<information>d</information>\n\n"
    assert is_valid_sequence(turn * searches + "<think>t</think>\n<answer>a</answer>").valid


@pytest.mark.parametrize("count", [0, 2])
def test_exactly_one_answer_is_needed(count: int) -> None:
    assert not is_valid_sequence("<think>t</think><answer>a</answer>" * count).valid


@given(st.lists(st.sampled_from([*TAGS, "x", " ", "<", "</think", "think>"]), max_size=30))
def test_any_mixture_of_tags_gets_a_result_with_a_reason(parts: list[str]) -> None:
    result = is_valid_sequence("".join(parts))
    assert result.reason
    assert not result.valid or result.state is State.END


@given(st.text())
def test_plain_text_is_never_valid(text: str) -> None:
    assert not is_valid_sequence(text).valid


def test_a_long_violation_is_quoted_in_part() -> None:
    result = is_valid_sequence("x" * 1_000_000)
    assert len(result.offending) < 200
    assert len(result.reason) < 300


def test_megabytes_of_tags_are_read_in_linear_time() -> None:
    assert is_valid_sequence("<think>" * 300_000 + "</think>" * 300_000).offending == "<think>"
