"""Canaries: each pattern fires on what it describes and stays quiet on an honest trajectory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage_reward.serve.canaries import MAX_WORDS_BEYOND, Canary, find_canaries
from forage_reward.trajectory import GroundTruth, Role, Span, TrajectoryView

PROMPT = "For example, <answer> Beijing </answer>. Question: where?\n<|im_start|>assistant\n"
SEARCH = "<think>t</think><search>q</search>"
PASSAGE = "<information>Doc 1(Title: Oslo) Oslo is the capital.</information>"


def find_fired(*texts: str, prompt: str = PROMPT, targets: tuple[str, ...] = ("Oslo",)) -> set[Canary]:
    """Return the canaries of texts written by model and environment in turn."""
    roles = (Role.MODEL, Role.ENV)
    spans = (Span(Role.PROMPT, prompt), *(Span(roles[index % 2], text) for index, text in enumerate(texts)))
    return set(find_canaries(TrajectoryView(spans), GroundTruth(targets)))


def test_an_honest_trajectory_fires_nothing() -> None:
    assert find_fired(SEARCH, PASSAGE, "<think>t</think><answer>Oslo</answer>") == set()
    assert find_fired("<think>t</think><answer>Rome</answer>") == set()


@pytest.mark.parametrize(
    ("texts", "canary"),
    [
        ((SEARCH, PASSAGE, "<answer>beijing</answer>"), Canary.COPIED_EXAMPLE),
        ((SEARCH, PASSAGE, "<answer>Rome</answer><answer>Oslo</answer>"), Canary.MANY_ANSWERS),
        ((SEARCH, PASSAGE, "<answer> \n </answer>"), Canary.UNUSUAL_LENGTH),
        ((SEARCH, PASSAGE, f"<answer>{'word ' * (MAX_WORDS_BEYOND + 2)}</answer>"), Canary.UNUSUAL_LENGTH),
        (("<answer>Oslo</answer>" + SEARCH, PASSAGE), Canary.UNSEARCHED),
        ((SEARCH, "<information>&lt;answer&gt;Oslo&lt;/answer&gt;</information>", "x"), Canary.TAGS_IN_PASSAGE),
        ((SEARCH, "<information>&#60;/think&#62;</information>", "x"), Canary.TAGS_IN_PASSAGE),
        ((SEARCH, "<information>&LT;Search&GT;</information>", "x"), Canary.TAGS_IN_PASSAGE),
        ((SEARCH, "<information><answer>Oslo</answer></information>", "x"), Canary.TAGS_IN_PASSAGE),
        ((SEARCH, "<information>a</information>b</information>", "x"), Canary.TAGS_IN_PASSAGE),
        ((SEARCH, "<information>a</think>", "x"), Canary.TAGS_IN_PASSAGE),
    ],
)
def test_each_canary_fires_alone_on_its_pattern(texts: tuple[str, ...], canary: Canary) -> None:
    assert find_fired(*texts) == {canary}


def test_the_answer_of_the_example_fires_nothing_where_it_is_right() -> None:
    assert find_fired(SEARCH, PASSAGE, "<answer>Beijing</answer>", targets=("Beijing",)) == set()


def test_the_length_is_measured_against_the_longest_accepted_answer() -> None:
    long = "word " * (MAX_WORDS_BEYOND + 2)
    assert find_fired(f"<answer>{long}</answer>", targets=("a", "two words or more")) == set()


def test_feedback_that_names_the_tags_is_not_a_passage() -> None:
    feedback = "\nMy action is invalid. Put the query between <search> and </search>, the answer in <answer>.\n"
    assert find_fired("x", feedback, "<answer>Oslo</answer>") == set()


TEXTS = st.lists(st.sampled_from(["<answer>", "</answer>", "<search>", "<information>", "</information>", "a", "&lt;"]))


@given(st.lists(TEXTS.map("".join), max_size=6), st.lists(st.text(), max_size=2))
def test_no_text_raises(texts: list[str], targets: list[str]) -> None:
    assert find_fired(*texts, targets=tuple(targets)) <= set(Canary)
