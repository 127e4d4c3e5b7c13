"""The end of a generation, and the action that it asks for."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forage_proto.v1.trajectory_pb2 import ActionKind, Prompt
from forage_rollout.environments.environment import Action, Episode
from forage_rollout.environments.search import Search
from forage_rollout.loop.trajectory_builder import cut_at_stop
from forage_runtime.settings import RolloutSettings

KINDS = {
    None: ActionKind.ACTION_KIND_INVALID,
    "search": ActionKind.ACTION_KIND_SEARCH,
    "answer": ActionKind.ACTION_KIND_ANSWER,
}
STOPS = ("</search>", "</answer>")
PIECES = [
    "</search>",
    "</answer>",
    "</search><",
    "h></s",
    "<search>",
    "<answer>",
    "</",
    "search",
    "answer",
    ">",
    "x",
    " ",
]


def parse_action(text: str) -> Action:
    return Search(RolloutSettings(), None).parse(text, Episode(Prompt()))  # type: ignore[arg-type]


def test_a_generation_is_cut_as_the_table_says(cuts_row: dict[str, Any], char_codec: Any) -> None:
    codec = char_codec()
    part = cut_at_stop(codec.encode(cuts_row["text"]), codec.decode, STOPS)
    assert part.text == cuts_row["kept"]
    assert part.length == len(cuts_row["kept"])


def test_an_action_is_read_as_the_table_says(actions_row: dict[str, Any]) -> None:
    action = parse_action(actions_row["text"])
    assert action.tag == (actions_row["action"] or "")
    assert (action.kind, action.content) == (KINDS[actions_row["action"]], actions_row["content"])


@pytest.mark.parametrize(
    ("tokens", "kept", "text"),
    [
        (["a", "</search>", "b"], 2, "a</search>"),
        (["a", "</sea", "rch><", "b"], 3, "a</search>"),
        (["a</search></answer>", "b"], 1, "a</search>"),
        (["a</answer>", "b</search>", "c"], 2, "a</answer>b</search>"),
        (["a</answer>b"], 1, "a</answer>"),
        (["</search>", "</search>"], 1, "</search>"),
        (["<", "/search", ">", ">"], 3, "</search>"),
        (["no stop"], 1, "no stop"),
        ([], 0, ""),
    ],
)
def test_the_token_that_completes_the_stop_text_is_kept_last(tokens: list[str], kept: int, text: str) -> None:
    part = cut_at_stop(range(len(tokens)), lambda ids: "".join(tokens[i] for i in ids), STOPS)
    assert (part.length, part.text) == (kept, text)
    assert part.stopped == (text != "no stop" and bool(tokens))


@settings(max_examples=40)
@given(st.lists(st.sampled_from(PIECES), max_size=12))
def test_the_kept_prefix_is_the_shortest_with_the_stop_text(tokens: list[str]) -> None:
    part = cut_at_stop(range(len(tokens)), lambda ids: "".join(tokens[i] for i in ids), STOPS)
    whole = "".join(tokens)
    stop = next((tag for tag in STOPS if tag in whole), None)
    if stop is None:
        assert (part.length, part.text) == (len(tokens), whole)
        return
    assert stop in "".join(tokens[: part.length])
    assert stop not in "".join(tokens[: part.length - 1])
    assert part.text == whole[: whole.index(stop) + len(stop)]


@settings(max_examples=40)
@given(st.text(alphabet="<>/searchanwe \n", max_size=60))
def test_no_text_breaks_the_parser(text: str) -> None:
    action = parse_action(text)
    assert action.content == action.content.strip()


@settings(max_examples=40)
@given(st.lists(st.sampled_from(PIECES), max_size=20).map("".join))
def test_an_action_is_the_first_complete_block(text: str) -> None:
    match = re.search(r"<(search|answer)>(.*?)</\1>", text, re.DOTALL)
    action = parse_action(text)
    assert (action.tag, action.content) == ((match[1], match[2].strip()) if match else ("", ""))


def test_opening_tags_without_closing_tags_are_parsed_in_linear_time() -> None:
    """Where it is quadratic the time limit of the test ends it: it takes hours."""
    assert parse_action("<search>" * 500_000).kind == ActionKind.ACTION_KIND_INVALID


def test_without_stops_nothing_is_cut() -> None:
    part = cut_at_stop([1, 2], lambda ids: "</answer>" * len(ids), ())
    assert (part.length, part.text, part.stopped) == (2, "</answer></answer>", False)
