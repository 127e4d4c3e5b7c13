"""The structured reward and its distribution over tokens."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage_common.structured_to_tokens import (
    Strategy,
    StructuredReward,
    structured_reward,
    structured_to_tokens,
)
from forage_reward.parsing.turns import MAX_GENERATION, parse_action, parse_strict_action, read_turns
from forage_reward.registry import bind_reward
from forage_reward.rewards.structured import compute_otc_factor, flag_valid_queries
from forage_reward.score import Component, Score, Status
from forage_reward.trajectory import Action, GroundTruth, Role, Span, TrajectoryView, Turn

DATA = Path(__file__).parents[2] / "data/reward"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).open()]


def compute_score(view: TrajectoryView, targets: tuple[str, ...] = ("Oslo",), **params: object) -> Score:
    return bind_reward("structured", params, "here")(view, GroundTruth(targets))


def parts(score: Score) -> dict[str, Component]:
    return {component.name: component for component in score.components}


@pytest.mark.parametrize("row", rows("structured.jsonl"))
@pytest.mark.parametrize("has_turns", [True, False], ids=["turns-given", "turns-parsed-from-spans"])
def test_turns_and_trajectories_earn_their_rewards(row: dict[str, Any], has_turns: bool) -> None:
    spans = []
    for text, seen in zip(row["texts"], row["seen"], strict=True):
        spans += [Span(Role.MODEL, text), *([Span(Role.ENV, seen)] if seen else [])]
    turns = tuple(Turn(Action(action), content, answered) for action, content, answered in row["turns"])
    score = compute_score(
        TrajectoryView(tuple(spans), turns=turns if has_turns else ()), tuple(row["targets"]), **row["params"]
    )
    components, want = parts(score), row["want"]
    assert [components[f"turn_{index}"].raw for index in range(1, len(turns) + 1)] == pytest.approx(want["turns"])
    assert f"turn_{len(turns) + 1}" not in components
    assert components["exact_match"].weighted == pytest.approx(want["exact_match"])
    assert components["retrieval_quality"].weighted == pytest.approx(want["retrieval_quality"])
    assert score.total == pytest.approx(want["total"])
    assert components["_otc_factor"].raw == 1.0


@pytest.mark.parametrize("row", rows("turn_format.jsonl"))
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
    assert parts(compute_score(view, **weights))["turn_1"].raw == want


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
    plain, scaled = parts(compute_score(view)), parts(compute_score(view, otc=True))
    for name in ("exact_match", "retrieval_quality"):
        assert scaled[name].weighted == pytest.approx(plain[name].weighted * compute_otc_factor(1, 4.0))
    assert scaled["turn_1"] == plain["turn_1"]
    assert (scaled["_searches"].raw, scaled["_searches"].weighted) == (1.0, 0.0)


@pytest.mark.parametrize("row", rows("structured_to_tokens.jsonl"))
def test_tokens_get_the_expected_rewards(row: dict[str, Any]) -> None:
    whole = sum(value for name, value in row["whole"].items() if not name.startswith("_"))
    reward = StructuredReward({int(turn): value for turn, value in row["turns"]}, whole)
    result = structured_to_tokens(reward, row["mask"], row["turn_ids"], Strategy(row["strategy"]))
    assert result.rewards == pytest.approx(row["want"])
    assert result.flagged == (not any(row["mask"]))


def test_a_mask_and_turn_ids_of_different_lengths_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 mask values but 1 turn ids"):
        structured_to_tokens(StructuredReward({}, 1.0), [1, 1], [1], Strategy.FINAL_TOKEN_ONLY)


values = st.floats(-10, 10)
tokens = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([-1, 1, 2, 3, 4])), max_size=40)


@given(st.dictionaries(st.integers(1, 5), values, max_size=5), values, tokens, st.sampled_from(Strategy))
def test_the_conversion_conserves_its_sum(
    turns: dict[int, float], whole: float, response: list[tuple[int, int]], strategy: Strategy
) -> None:
    mask, turn_ids = [mask for mask, _ in response], [turn for _, turn in response]
    result = structured_to_tokens(StructuredReward(turns, whole), mask, turn_ids, strategy)
    with_tokens = {turn for valid, turn in response if valid}
    if not any(mask):
        assert result.flagged
        assert result.rewards == [0.0] * len(mask)
        return
    sums = {
        Strategy.TURN_PROPORTIONAL: sum(value for turn, value in turns.items() if turn in with_tokens) + whole,
        Strategy.FINAL_TOKEN_ONLY: (sum(turns.values()) / len(turns) if turns else 0.0) + whole,
    }
    assert sum(result.rewards) == pytest.approx(sums[strategy], abs=1e-9)
    assert result.turn_sum == pytest.approx(sums[Strategy.TURN_PROPORTIONAL], abs=1e-9)
    assert result.mean_sum == pytest.approx(sums[Strategy.FINAL_TOKEN_ONLY], abs=1e-9)
    assert all(reward == 0.0 for reward, valid in zip(result.rewards, mask, strict=True) if not valid)


def test_turn_and_trajectory_rewards_are_read_from_the_components() -> None:
    spans = (Span(Role.MODEL, QUERY), Span(Role.ENV, "<information>Oslo</information>"), Span(Role.MODEL, ANSWER))
    score = compute_score(TrajectoryView(spans))
    reward = structured_reward(score.components)
    assert reward.turns == pytest.approx({1: 0.25, 2: 0.25})
    assert reward.whole == pytest.approx(0.7)
    assert reward.mean_of_turns + reward.whole == pytest.approx(score.total)


def test_a_component_for_logs_is_rewarded_nowhere_whatever_it_holds() -> None:
    logged = (Component("_log", 7.0, 7.0), Component("_a.turn_1", 3.0, 3.0))
    reward = structured_reward((Component("turn_1", 0.5, 0.5), *logged, Component("exact_match", 1.0, 0.25)))
    assert (reward.turns, reward.whole) == ({1: 0.5}, 0.25)
