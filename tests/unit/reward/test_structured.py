"""The structured reward."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from forage_reward.parsing.turns import MAX_GENERATION, parse_action, parse_strict_action, read_turns
from forage_reward.registry import bind_reward
from forage_reward.rewards.structured import compute_otc_factor, flag_valid_queries
from forage_reward.score import Component, Score, Status
from forage_reward.trajectory import Action, GroundTruth, Role, Span, TrajectoryView, Turn

DATA = Path(__file__).parents[2] / "data/reward"


def load_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).open()]


def compute_score(view: TrajectoryView, targets: tuple[str, ...] = ("Oslo",), **params: object) -> Score:
    return bind_reward("structured", params, "here")(view, GroundTruth(targets))


def index_components(score: Score) -> dict[str, Component]:
    return {component.name: component for component in score.components}


@pytest.mark.parametrize("row", load_rows("structured.jsonl"))
@pytest.mark.parametrize("has_turns", [True, False], ids=["turns-given", "turns-parsed-from-spans"])
def test_turns_and_trajectories_earn_their_rewards(row: dict[str, Any], has_turns: bool) -> None:
    spans = []
    for text, seen in zip(row["texts"], row["seen"], strict=True):
        spans += [Span(Role.MODEL, text), *([Span(Role.ENV, seen)] if seen else [])]
    turns = tuple(Turn(Action(action), content, answered) for action, content, answered in row["turns"])
    score = compute_score(
        TrajectoryView(tuple(spans), turns=turns if has_turns else ()), tuple(row["targets"]), **row["params"]
    )
    components, want = index_components(score), row["want"]
    assert [components[f"turn_{index}"].raw for index in range(1, len(turns) + 1)] == pytest.approx(want["turns"])
    assert f"turn_{len(turns) + 1}" not in components
    assert components["exact_match"].weighted == pytest.approx(want["exact_match"])
    assert components["retrieval_quality"].weighted == pytest.approx(want["retrieval_quality"])
    assert score.total == pytest.approx(want["total"])
    assert components["_otc_factor"].raw == 1.0


@pytest.mark.parametrize("row", load_rows("turn_format.jsonl"))
def test_only_well_formed_generations_have_an_action(row: dict[str, Any]) -> None:
    assert parse_strict_action(row["text"]) == row["want"]


def test_a_generation_beyond_the_limit_is_not_well_formed() -> None:
    text = "<think>{}</think><answer>a</answer>"
    room = MAX_GENERATION - len(text.format(""))
    assert parse_strict_action(text.format("t" * room)) is Action.ANSWER
    assert parse_strict_action(text.format("t" * (room + 1))) is Action.INVALID


QUERY, ANSWER = "<think>t</think><search>q</search>", "<think>t</think><answer>Oslo</answer>"
SEARCH, FAILED = Turn(Action.SEARCH, "q", True), Turn(Action.SEARCH, "q", False)
CELLS = [  # the turn, its text, what it earns of query 1, answer 2, format 4
    (SEARCH, QUERY, 5.0),
    (FAILED, QUERY, 4.0),
    (SEARCH, "so " + QUERY, 1.0),
    (FAILED, "so " + QUERY, 0.0),
    (Turn(Action.ANSWER, "Oslo"), ANSWER, 6.0),
    (Turn(Action.ANSWER, "Oslo"), "so " + ANSWER, 2.0),
    (Turn(Action.ANSWER, "Oslo", True), ANSWER, 6.0),
    (Turn(Action.INVALID), "words", 0.0),
    (Turn(Action.INVALID), ANSWER, 0.0),
    (Turn(Action.ANSWER), QUERY, 2.0),
    (SEARCH, ANSWER, 1.0),
]


@pytest.mark.parametrize(("turn", "text", "want"), CELLS)
@pytest.mark.parametrize("ending", ["", "</s>", "</s>\n"])
def test_every_kind_of_turn_earns_its_own_parts(turn: Turn, text: str, want: float, ending: str) -> None:
    view = TrajectoryView((Span(Role.MODEL, text + ending),), "</s>", (turn,))
    weights = {"kg_query_validity": 1.0, "is_answer_score": 2.0, "format_score": 4.0}
    assert index_components(compute_score(view, **weights))["turn_1"].raw == want


@pytest.mark.parametrize(
    ("turns", "want"),
    [
        ([("a", True), ("a", True)], [True, False]),
        ([("a", True), (" A\n", True)], [True, False]),
        ([("a", True), ("b", True), ("a", True)], [True, True, False]),
        ([("a", False), ("a", True)], [False, True]),
        ([("", True), ("", True)], [True, False]),
    ],
)
def test_a_query_is_valid_once(turns: list[tuple[str, bool]], want: list[bool]) -> None:
    assert flag_valid_queries([Turn(Action.SEARCH, content, answered) for content, answered in turns]) == want


def test_an_answer_does_not_make_a_query_a_repetition() -> None:
    assert flag_valid_queries([Turn(Action.ANSWER, "a"), Turn(Action.SEARCH, "a", True)]) == [False, True]


def test_without_turns_the_mean_is_zero() -> None:
    score = compute_score(TrajectoryView((Span(Role.ENV, "<information>Oslo</information>"),)))
    assert (score.status, score.total) == (Status.OK, pytest.approx(0.4))


def test_turns_that_do_not_match_the_text_are_invalid_input() -> None:
    score = compute_score(TrajectoryView((Span(Role.MODEL, ANSWER),), turns=(SEARCH, SEARCH)))
    assert score.status is Status.INVALID_INPUT
    assert "2 turns but 1" in score.detail


def test_a_search_counts_as_answered_only_where_an_observation_follows() -> None:
    spans = (
        Span(Role.MODEL, "<think>t</think>"),
        Span(Role.MODEL, "<search> one </search>"),
        Span(Role.ENV, "<information>d</information>"),
        Span(Role.MODEL, "<search>two</search>"),
        Span(Role.ENV, "That was no valid action."),
        Span(Role.MODEL, "none"),
    )
    assert read_turns(TrajectoryView(spans)) == (
        Turn(Action.SEARCH, "one", True),
        Turn(Action.SEARCH, "two", False),
        Turn(Action.INVALID, "", False),
    )


@pytest.mark.parametrize(
    ("text", "action", "content"),
    [
        ("<search> q </search>", Action.SEARCH, "q"),
        ("<answer>a</answer><search>q</search>", Action.ANSWER, "a"),
        ("<answer>a<search>q</search>", Action.SEARCH, "q"),
        ("<kg-query>get(x)</kg-query>", Action.SEARCH, "get(x)"),
        ("</search><search>q</search>", Action.SEARCH, "q"),
        ("<search>q", Action.INVALID, ""),
        ("", Action.INVALID, ""),
    ],
)
def test_the_first_complete_action_block_counts(text: str, action: Action, content: str) -> None:
    assert parse_action(text) == (action, content)


def test_otc_decreases_the_reward_with_every_search() -> None:
    factors = [compute_otc_factor(searches, 4.0) for searches in range(50)]
    assert factors[0] == 1.0
    assert all(later < earlier for earlier, later in pairwise(factors))
    assert factors[-1] > 0
    search = (Span(Role.MODEL, QUERY), Span(Role.ENV, "<information>Oslo</information>"))
    view = TrajectoryView((*search, Span(Role.MODEL, ANSWER)))
    plain, scaled = index_components(compute_score(view)), index_components(compute_score(view, otc=True))
    for name in ("exact_match", "retrieval_quality"):
        assert scaled[name].weighted == pytest.approx(plain[name].weighted * compute_otc_factor(1, 4.0))
    assert scaled["turn_1"] == plain["turn_1"]
    assert (scaled["_searches"].raw, scaled["_searches"].weighted) == (1.0, 0.0)


def test_the_components_of_turns_are_shares_of_their_mean() -> None:
    spans = (Span(Role.MODEL, QUERY), Span(Role.ENV, "<information>Oslo</information>"), Span(Role.MODEL, ANSWER))
    score = compute_score(TrajectoryView(spans))
    turns = [part for part in score.components if part.name.startswith("turn_")]
    assert [(part.name, part.raw) for part in turns] == [("turn_1", 0.25), ("turn_2", 0.25)]
    assert [part.weighted for part in turns] == pytest.approx([0.125, 0.125])
    assert sum(part.weighted for part in score.components) == pytest.approx(score.total) == pytest.approx(0.95)
