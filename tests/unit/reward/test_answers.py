"""Normalisation, comparison and extraction, by tables and by properties."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage_reward.parsing.answers import extract_observations, extract_solution
from forage_reward.parsing.raw_text import split_spans
from forage_reward.trajectory import Role, Span, TrajectoryView
from forage_runtime.text.answers import (
    MAX_ANSWER,
    MAX_EVIDENCE,
    em_check,
    f1,
    is_retrieval_correct,
    normalize_answer,
    subem_check,
)
from forage_runtime.text.tags import Tag, find_blocks, find_last_block

DATA = Path(__file__).parents[2] / "data/reward"


def load_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def view(*spans: tuple[Role, str]) -> TrajectoryView:
    return TrajectoryView(tuple(Span(role, text) for role, text in spans))


@pytest.mark.parametrize("row", load_rows("normalize_answer"))
def test_answers_are_normalised_as_in_published_results(row: dict[str, Any]) -> None:
    value = row["value"]
    if isinstance(value, dict):
        value = value["text"] * value["times"]
    assert normalize_answer(value) == row["want"]


def test_a_missing_value_normalises_to_an_empty_text() -> None:
    assert normalize_answer(None) == ""


@pytest.mark.parametrize("row", load_rows("em_check"))
def test_an_answer_matches_any_gold(row: dict[str, Any]) -> None:
    assert em_check(row["prediction"], row["golds"]) is row["want"]


@pytest.mark.parametrize("row", load_rows("extract_solution"))
def test_the_last_answer_of_the_model_is_extracted(row: dict[str, Any]) -> None:
    assert extract_solution(TrajectoryView(split_spans(row["dump"]))) == row["want"]


@pytest.mark.parametrize("row", load_rows("retrieval"))
def test_evidence_is_a_gold_inside_an_observation(row: dict[str, Any]) -> None:
    assert is_retrieval_correct(find_blocks(row["text"], Tag.INFORMATION), row["golds"]) is row["want"]


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
def test_only_uninterrupted_model_text_is_an_answer(spans: list[tuple[Role, str]], want: str | None) -> None:
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
    assert extract_observations(trajectory) == ["Rome", "Bern"]


@given(st.text())
def test_a_normal_form_has_single_spaces_and_no_articles(text: str) -> None:
    normal = normalize_answer(text)
    assert normal == " ".join(normal.split())
    assert not {"a", "an", "the"} & set(normal.split())


@given(st.text() | st.text(alphabet="AaNnTtHhEe .'\u0130\u03a3\u0307\u3000"))
def test_normalisation_is_idempotent(text: str) -> None:
    assert normalize_answer(normalize_answer(text)) == normalize_answer(text)


@given(st.text(), st.lists(st.text(), max_size=3))
def test_the_prediction_itself_as_a_gold_always_matches(prediction: str, others: list[str]) -> None:
    assert em_check(prediction, [*others, prediction]) is bool(normalize_answer(prediction))


@given(st.text(alphabet="Aa Nn Tt Hh Ee.?!"), st.lists(st.text(alphabet="AaNn TtHhEe.?!x"), max_size=3))
def test_an_answer_without_words_never_matches(prediction: str, golds: list[str]) -> None:
    if not normalize_answer(prediction):
        assert not em_check(prediction, [*golds, prediction])
        assert not subem_check(prediction, [*golds, prediction])
        assert f1(prediction, [*golds, prediction]) == 0


@given(st.lists(st.sampled_from(["<answer>", "</answer>", "x", "\n", "<answ", "er>"]), max_size=12))
def test_blocks_equal_the_matches_of_the_lazy_regular_expression(parts: list[str]) -> None:
    import re

    text = "".join(parts)
    assert find_blocks(text, Tag.ANSWER) == re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)


def test_a_million_opening_tags_without_a_closing_tag_are_read_in_linear_time() -> None:
    # The lazy pattern would need 10^12 steps here, so the suite's time limit is what fails.
    assert find_blocks("<answer>" * 1_000_000, Tag.ANSWER) == []


@pytest.mark.parametrize(
    ("prediction", "golds", "want"),
    [
        ("It is Oslo, Norway", ["oslo"], True),
        ("Osl o", ["oslo"], False),
        ("Oslo", ["Oslo, Norway"], False),
        ("Rome", ["Oslo", "ROME!"], True),
        ("Oslo", "Oslo", True),
        ("anything", ["The"], False),
        ("A!", ["The"], False),
        ("Oslo", [], False),
        ("Oslo", [None], False),
        ("Paris", "p", True),
    ],
)
def test_a_gold_may_stand_inside_a_longer_answer(prediction: str, golds: str | list[object], want: bool) -> None:
    assert subem_check(prediction, golds) is want


@pytest.mark.parametrize(
    ("prediction", "golds", "want"),
    [
        ("Oslo", ["Oslo"], 1.0),
        ("the Oslo!", ["oslo"], 1.0),
        ("Paris, Rome", ["Paris"], 2 / 3),
        ("Paris", ["Paris Rome"], 2 / 3),
        ("Paris", ["Rome", "Paris Rome"], 2 / 3),
        ("new new york", ["new york"], 0.8),
        ("Rome", ["Oslo"], 0.0),
        ("Oslo", [], 0.0),
        ("The", ["A"], 0.0),
        ("The", ["Oslo"], 0.0),
        ("Oslo", ["!"], 0.0),
        ("ab", "ab", 1.0),
    ],
)
def test_f1_compares_with_the_closest_gold(prediction: str, golds: str | list[str], want: float) -> None:
    assert f1(prediction, golds) == pytest.approx(want)


words = st.lists(st.sampled_from(["Oslo", "oslo", "the", "!", "new", "York", "-5", "\u0130"]), max_size=5).map(" ".join)


@given(words, st.lists(words, max_size=3))
def test_exact_match_implies_substring_match_and_full_f1(prediction: str, golds: list[str]) -> None:
    share = f1(prediction, golds)
    assert 0.0 <= share <= 1.0
    if em_check(prediction, golds):
        assert subem_check(prediction, golds)
        assert share == 1.0


@pytest.mark.parametrize("compare", [em_check, subem_check, f1])
def test_an_answer_beyond_the_limit_is_wrong(compare: Any) -> None:
    assert compare("Oslo".ljust(MAX_ANSWER), ["Oslo"])
    assert not compare("Oslo".ljust(MAX_ANSWER + 1), ["Oslo"])


def test_evidence_beyond_the_limit_is_not_read() -> None:
    filler = "x" * (MAX_EVIDENCE - 4)
    assert is_retrieval_correct([filler, "Oslo"], ["Oslo"])
    assert not is_retrieval_correct([filler, "Os", "Oslo"], ["Oslo"])


@given(st.lists(st.sampled_from(["<answer>", "</answer>", "a", "<answer", "\n", "<"]), max_size=14).map("".join))
def test_the_last_block_is_the_last_of_all_blocks(text: str) -> None:
    all_blocks = find_blocks(text, Tag.ANSWER)
    assert find_last_block(text, Tag.ANSWER) == (all_blocks[-1] if all_blocks else None)


@given(st.text(st.sampled_from("aAnthe .,-_9é–’\x00ß\u0663²٣\u00a0\n"), max_size=30))
def test_fast_normalisation_equals_the_regular_expression(text: str) -> None:
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    assert normalize_answer(text) == " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())
