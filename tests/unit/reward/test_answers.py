"""Normalisation, comparison and extraction, by tables and by properties."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage_reward.answers import em_check, extract_solution, is_retrieval_correct, normalize_answer, observations
from forage_reward.raw_text import spans_from_text
from forage_reward.tags import Tag, blocks
from forage_reward.trajectory import Role, Span, TrajectoryView

DATA = Path(__file__).parents[2] / "data/reward"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def view(*spans: tuple[Role, str]) -> TrajectoryView:
    return TrajectoryView(tuple(Span(role, text) for role, text in spans))


@pytest.mark.parametrize("row", rows("normalize_answer"))
def test_answers_are_normalised_as_in_published_figures(row: dict[str, Any]) -> None:
    value = row["value"]
    if isinstance(value, dict):
        value = value["text"] * value["times"]
    assert normalize_answer(value) == row["want"]


def test_no_value_normalises_to_nothing() -> None:
    assert normalize_answer(None) == ""


@pytest.mark.parametrize("row", rows("em_check"))
def test_an_answer_matches_any_gold(row: dict[str, Any]) -> None:
    assert em_check(row["prediction"], row["golds"]) is row["want"]


@pytest.mark.parametrize("row", rows("extract_solution"))
def test_the_last_answer_of_the_model_is_extracted(row: dict[str, Any]) -> None:
    assert extract_solution(TrajectoryView(spans_from_text(row["dump"]))) == row["want"]


@pytest.mark.parametrize("row", rows("retrieval"))
def test_evidence_is_a_gold_inside_an_observation(row: dict[str, Any]) -> None:
    assert is_retrieval_correct(blocks(row["text"], Tag.INFORMATION), row["golds"]) is row["want"]


@pytest.mark.parametrize(
    ("spans", "want"),
    [
        ([(Role.PROMPT, "<answer>Oslo</answer>"), (Role.MODEL, "none")], None),
        ([(Role.MODEL, "none"), (Role.ENV, "<answer>Oslo</answer>")], None),
        ([(Role.MODEL, "<answer>Os"), (Role.MODEL, "lo</answer>")], "Oslo"),
        ([(Role.MODEL, "<answer>"), (Role.ENV, "Oslo"), (Role.MODEL, "</answer>")], None),
        ([(Role.MODEL, "<ANSWER>Oslo</ANSWER>")], None),
        ([(Role.MODEL, '<answer lang="no">Oslo</answer>')], None),
        ([(Role.MODEL, "<answer>Os\nlo</answer>")], "Os\nlo"),
        ([(Role.MODEL, "<answer>Oslo</answer>"), (Role.ENV, "x"), (Role.MODEL, "<answer>Rome</answer>")], "Rome"),
        ([(Role.MODEL, "<answer>a <answer>b</answer>")], "a <answer>b"),
    ],
)
def test_only_what_the_model_wrote_in_one_piece_is_an_answer(spans: list[tuple[Role, str]], want: str | None) -> None:
    assert extract_solution(view(*spans)) == want


def test_only_the_environment_gives_evidence() -> None:
    trajectory = view(
        (Role.PROMPT, "<information>Oslo</information>"),
        (Role.MODEL, "<information>Oslo</information>"),
        (Role.ENV, "not inside tags: Oslo"),
        (Role.MODEL, "x"),
        (Role.ENV, "<information>Rome"),
        (Role.ENV, "</information><information>Bern</information>"),
    )
    assert observations(trajectory) == ["Rome", "Bern"]


@given(st.text())
def test_a_normal_form_has_single_spaces_and_no_articles(text: str) -> None:
    normal = normalize_answer(text)
    assert normal == " ".join(normal.split())
    assert not {"a", "an", "the"} & set(normal.split())


@given(st.text(), st.lists(st.text(), max_size=3))
def test_the_prediction_itself_as_a_gold_always_matches(prediction: str, others: list[str]) -> None:
    assert em_check(prediction, [*others, prediction])


@given(st.lists(st.sampled_from(["<answer>", "</answer>", "x", "\n", "<answ", "er>"]), max_size=12))
def test_blocks_are_those_of_the_lazy_pattern(parts: list[str]) -> None:
    import re

    text = "".join(parts)
    assert blocks(text, Tag.ANSWER) == re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)


def test_a_million_openers_without_closer_are_read_in_one_pass() -> None:
    # The lazy pattern would need 10^12 steps here, so the suite's time limit is what fails.
    assert blocks("<answer>" * 1_000_000, Tag.ANSWER) == []
