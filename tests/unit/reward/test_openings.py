"""Formats where the chat template begins the policy's turn: they read it as if the policy had written all of it."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from forage_proto.v1.reward_pb2 import ScoreItem
from forage_proto.v1.trajectory_pb2 import Role, Span
from forage_reward.command.dumps import RowError, read_row
from forage_reward.registry import bind_reward
from forage_reward.score import Score
from forage_reward.trajectory import GroundTruth
from forage_reward.wire import read_view

ENDS = json.loads((Path(__file__).parents[2] / "data/templates/ends.json").read_text(encoding="utf-8"))
SEARCHED = ("<think>\nt</think>\n<search>q</search>", "\n\n<information>Oslo</information>\n\n")
LAST = {
    "right": "<think>\nt</think>\n<answer>Oslo</answer>",
    "wrong": "<think>\nt</think>\n<answer>Rome</answer>",
    "ill-formed": "<think>\nt\n<answer>Oslo</answer>",
}


def score(reward: str, prompt: str, opening: str, turns: list[str]) -> Score:
    spans = [Span(role=Role.ROLE_PROMPT, text=prompt)]
    if opening:
        spans.append(Span(role=Role.ROLE_PROMPT, text=opening, opening=True))
    for place, text in enumerate(turns):
        spans.append(Span(role=Role.ROLE_ENV if place % 2 else Role.ROLE_MODEL, text=text))
    return bind_reward(reward, {}, "here")(read_view(ScoreItem(spans=spans)), GroundTruth(("Oslo",)))


EARNED = {
    ("search_r1_format", "right"): (1.0, 1.0),
    ("search_r1_format", "wrong"): (0.2, 0.3),
    ("search_r1_format", "ill-formed"): (0.8, 0.8),
    ("em", "right"): (1.0, 1.0),
    ("em", "wrong"): (0.0, 0.0),
    ("em", "ill-formed"): (1.0, 1.0),
    ("structured", "right"): (0.55, 0.95),
    ("structured", "wrong"): (0.25, 0.65),
    ("structured", "ill-formed"): (0.4, 0.875),
}
"""Without a search and with one, where the opening is none or `<think>`."""


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end["model"])
def test_a_turn_that_the_template_begins_earns_what_the_whole_turn_does(end: dict[str, str]) -> None:
    prompt, opening = "Question: who?" + end["prompt"].removesuffix(end["opening"]), end["opening"]
    is_thought = opening in ("", "<think>", "<think>\n")
    for (reward, kind), searches in product(EARNED, (0, 1)):
        turns = [*SEARCHED, LAST[kind]] if searches else [LAST[kind]]
        sampled = [turns[0].removeprefix(opening), *turns[1:]]
        found = score(reward, prompt, opening, sampled)
        assert found == score(reward, prompt, "", [opening + sampled[0], *sampled[1:]])
        if is_thought and not prompt.lower().endswith("assistant:"):  # after which no format is valid
            assert found.total == pytest.approx(EARNED[reward, kind][searches]), (reward, kind, searches)


def test_a_validations_rows_are_scored_as_its_trajectories_were() -> None:
    row = {
        "spans": [
            {"role": "prompt", "text": "Question: who?<|im_start|>assistant\n"},
            {"role": "opening", "text": "<think>\n"},
            {"role": "model", "text": LAST["right"].removeprefix("<think>\n")},
        ],
        "turns": [{"index": 1, "action": "ACTION_KIND_ANSWER", "content": "Oslo", "tag": "answer"}],
        "targets": ["Oslo"],
    }
    found = read_row(row)
    assert bind_reward("search_r1_format", {}, "here")(found.view, found.truth).total == 1.0
    assert [(turn.action, turn.content, turn.answered) for turn in found.view.turns] == [("answer", "Oslo", False)]
    search = {
        "action": "ACTION_KIND_SEARCH",
        "content": "q",
        "executed": True,
        "retrieval_status": "STATUS_OK",
        "new": 1,
    }
    (turn,) = read_row(row | {"turns": [search]}).view.turns
    assert (turn.action, turn.answered) == ("search", True)
    with pytest.raises(RowError, match="a turn is not"):
        read_row(row | {"turns": [search | {"action": "ACTION_KIND_DANCE"}]})
