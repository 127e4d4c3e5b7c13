"""Measures of what a policy writes: each against a naive computation, and on texts made by hand."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from arrived_groups import arrive, arrive_alone
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from forage_proto.v1.trajectory_pb2 import ActionKind, Status, Trajectory, TrajectoryGroup, Turn
from forage_runtime.settings import load_settings
from forage_trainer.reporting import behavior
from forage_trainer.reporting.behavior import (
    BehaviorMetrics,
    find_script,
    has_paired_tags,
    measure_foreign_letters,
    measure_repetition,
    split_tokens,
)

MODEL = Path(__file__).parents[3] / "models/tiny-policy"
CODEC = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
TAGS = ("think", "search", "answer")
QUESTION = "Question: what is the capital of Norway?"
SEARCH = "<think>I look it up</think><search>capital of Norway</search>"
ANSWER = "<think>It is there</think><answer>Oslo</answer>"
OBSERVED = "<information>Oslo is the capital of Norway.</information>"
UNKNOWN = dict.fromkeys(("repetition_rate", "broken_tag_rate", "foreign_letter_rate", "max_searches_rate"))


def build_trajectory(*turns: str, question: str = QUESTION, observed: str = OBSERVED, sample: int = 0) -> Trajectory:
    """Texts of the policy in turns, with an observation between two; a turn's action is that of its last tag."""
    prompt = CODEC.encode(question).ids
    ids, mask, turn_ids, made = list(prompt), [], [], []
    for number, text in enumerate(turns, 1):
        if number > 1:
            between = CODEC.encode(observed).ids
            ids, mask, turn_ids = ids + between, mask + [0] * len(between), turn_ids + [-1] * len(between)
        own = CODEC.encode(text).ids
        ids, mask, turn_ids = ids + own, mask + [1] * len(own), turn_ids + [number] * len(own)
        tag = next((tag for tag in ("search", "answer") if text.endswith(f"</{tag}>")), "")
        kinds = {"search": ActionKind.ACTION_KIND_SEARCH, "answer": ActionKind.ACTION_KIND_ANSWER}
        made.append(
            Turn(index=number, action=kinds.get(tag, ActionKind.ACTION_KIND_INVALID), tag=tag, executed=tag == "search")
        )
    return Trajectory(
        id=f"t/{sample}",
        sample=sample,
        status=Status.STATUS_OK,
        token_ids=ids,
        prompt_length=len(prompt),
        loss_mask=mask,
        turn_ids=turn_ids,
        logprobs=[-0.5 if one else 0.0 for one in mask],
        turns=made,
        valid_searches=sum(turn.tag == "search" for turn in made),
    )


def measure(*trajectories: Trajectory, overrides: Sequence[str] = ()) -> dict[str, float | None]:
    settings = load_settings(None, [f"model.path={MODEL}", "rollout.max_turns=2", *overrides], {})
    return BehaviorMetrics(settings).measure([arrive(TrajectoryGroup(trajectories=trajectories))])


def count_repeated(turns: Sequence[Sequence[int]], length: int) -> float | None:
    repeated = every = 0
    for turn in turns:
        for end in range(length, len(turn) + 1):
            every += 1
            own = turn[end - length : end]
            repeated += any(turn[before - length : before] == own for before in range(length, end))
    return repeated / every if every else None


@given(st.lists(st.lists(st.integers(0, 3), max_size=25), max_size=4), st.integers(1, 5))
def test_repetition_is_the_share_of_n_grams_that_occurred_before(turns: list[list[int]], length: int) -> None:
    result = measure_repetition([np.array(turn, np.int32) for turn in turns], length)
    assert result == pytest.approx(count_repeated(turns, length))


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([], None),
        ([[]], None),
        ([[1, 2, 3, 4, 5, 6, 7]], None),  # shorter than one 8-gram
        ([list(range(8))], 0.0),
        ([[7] * 8], 0.0),
        ([[7] * 107], 0.99),
        ([list(range(50)), list(range(50))], 0.0),  # in turns of their own
        ([list(range(50)) * 2], 43 / 93),
        ([[2**31 - 1, 256] * 8], 7 / 9),  # bytes of neighbours never match
    ],
)
def test_repetition_of_given_tokens(turns: list[list[int]], expected: float | None) -> None:
    assert measure_repetition([np.array(turn, np.int32) for turn in turns]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "is_paired"),
    [
        ("", True),
        ("no tag at all, 1 < 2", True),
        (SEARCH, True),
        ("I looked it up</think><answer>Oslo</answer>", True),  # the prompt opened the thought
        ("</think></think><answer>Oslo</answer>", False),
        ("</think><think>more</think><answer>Oslo</answer>", True),
        ("<think>I look it up<search>Norway</search>", False),
        ("<search>Norway", False),
        ("Norway</search>", False),
        ("</answer><answer>", False),
        ("<search>a<search>b</search></search>", False),
        ("<search>a</search><search>b</search>", True),
        ("<answer>a</answer></answer>", False),
        ("<search>a</search><information>made up</information>", False),
        ("</information>", False),
        ("<b>bold", True),  # no tag of an action
    ],
)
def test_tags_that_pair(text: str, is_paired: bool) -> None:
    assert has_paired_tags(text, TAGS) is is_paired


@given(st.lists(st.sampled_from(["<search>", "</search>", "a"])))
def test_tags_pair_where_openings_and_closings_take_turns(parts: list[str]) -> None:
    tags = [part for part in parts if part != "a"]
    expected = tags == ["<search>", "</search>"] * (len(tags) // 2)
    assert has_paired_tags("".join(parts), TAGS) is expected


@pytest.mark.parametrize(
    ("text", "given", "expected"),
    [
        ("", "abc", None),
        ("12 + 3 = 15 …", "abc", None),
        ("Oslo", QUESTION, 0.0),
        ("Осло", QUESTION, 1.0),
        ("Осло", "столица Норвегии", 0.0),
        ("abc北京d", QUESTION, 2 / 6),
        ("東京です", "東京", 0.0),  # Japanese mixes them
        ("서울", "東京", 1.0),
        ("naïve Ångström Łódź", QUESTION, 0.0),
        ("5 µm, ℕ, ﬁne, ｗｉｄｅ", QUESTION, 0.0),  # signs that stand for letters are of no script
        ("a\ufffd\ufffd\ufffd", QUESTION, 0.75),
        ("a\ufffd", "a\ufffd", 0.5),  # bytes that are no text are never known
        ("ok", "", 1.0),
    ],
)
def test_foreign_letters(text: str, given: str, expected: float | None) -> None:
    assert measure_foreign_letters(text, given) == pytest.approx(expected)


@given(st.text(), st.text())
def test_foreign_letters_are_a_share_and_none_of_what_was_given_is_foreign(text: str, other: str) -> None:
    share = measure_foreign_letters(text, other)
    letters = [one for one in text if find_script(one) != "COMMON"]
    assert (share is None) == (not letters)
    if share is not None:
        known = {find_script(one) for one in other} - {find_script("\ufffd")}
        assert share == pytest.approx(sum(find_script(one) not in known for one in letters) / len(letters))
    assert measure_foreign_letters(text.replace("\ufffd", ""), text) in (None, 0.0)


@given(st.characters())
def test_every_character_has_a_script_or_is_common(character: str) -> None:
    script = find_script(character)
    assert script
    assert script == "COMMON" or character == "\ufffd" or unicodedata.category(character).startswith("L")


def test_a_sound_trajectory_shows_no_sign() -> None:
    found = measure(build_trajectory(SEARCH, ANSWER))
    assert found == {
        "repetition_rate": 0.0, "broken_tag_rate": 0.0, "foreign_letter_rate": 0.0, "max_searches_rate": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("turns", "name", "expected"),
    [
        ((SEARCH, "<think>" + "and so on " * 40), "repetition_rate", pytest.approx(0.85, abs=0.15)),
        ((SEARCH, "<think>It is there</think>Oslo"), "broken_tag_rate", 1.0),
        ((SEARCH, "<think>It is there<answer>Oslo</answer>"), "broken_tag_rate", 1.0),
        (("<think>Где это</think><answer>Осло</answer>",), "foreign_letter_rate", pytest.approx(10 / 32, abs=0.1)),
        ((SEARCH, SEARCH, ANSWER), "max_searches_rate", 1.0),
    ],
)
def test_a_collapsed_trajectory_shows_its_sign_and_counts_as_one(
    turns: tuple[str, ...], name: str, expected: float
) -> None:
    collapsed = build_trajectory(*turns, sample=1)
    alone = measure(collapsed)[name]
    assert alone == expected
    both = measure(build_trajectory(SEARCH, ANSWER), collapsed)[name]
    assert both == pytest.approx(alone / 2)


def test_nothing_is_measured_where_nothing_is_known() -> None:
    failed = build_trajectory(SEARCH)
    failed.status = Status.STATUS_TIMEOUT
    assert measure() == measure(failed) == UNKNOWN
    assert measure(Trajectory(status=Status.STATUS_OK)) == UNKNOWN
    damaged = build_trajectory(SEARCH)
    del damaged.logprobs[3:]
    assert measure(damaged) == UNKNOWN | {"broken_tag_rate": 0.0, "max_searches_rate": 0.0}
    assert measure(build_trajectory(ANSWER), overrides=["rollout.max_turns=0"])["max_searches_rate"] is None


def test_without_a_tokenizer_only_texts_are_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [build_trajectory(SEARCH, ANSWER), build_trajectory(SEARCH, ANSWER)]
    found = measure(*rows, overrides=[f"model.path={tmp_path}"])
    assert found == {
        "repetition_rate": 0.0, "broken_tag_rate": 0.0, "foreign_letter_rate": None, "max_searches_rate": 0.0,
    }  # fmt: skip
    assert capsys.readouterr().err.count("behavior_not_measured") == 1


def test_the_sample_is_bounded_and_spread_over_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behavior, "MAX_TRAJECTORIES", 4)
    rows = [build_trajectory(*([SEARCH] * (number % 2) * 2), ANSWER, sample=number) for number in range(4)]
    assert measure(*rows)["max_searches_rate"] == 0.5
    # Of eight, each second one is drawn.
    pairs = [build_trajectory(*([SEARCH] * (number in (0, 4)) * 2), ANSWER, sample=number) for number in range(8)]
    assert measure(*pairs)["max_searches_rate"] == 0.5


def test_of_a_long_trajectory_the_end_is_measured_and_its_first_turn_may_be_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = build_trajectory(SEARCH, ANSWER)
    whole, _ = split_tokens(arrive_alone(row))
    monkeypatch.setattr(behavior, "MAX_TOKENS", len(whole[1]) + 3)
    turns, others = split_tokens(arrive_alone(row))
    assert [len(turn) for turn in turns] == [3, len(whole[1])]
    assert (turns[0] == whole[0][-3:]).all()
    assert len(others) <= behavior.MAX_TOKENS
    assert measure(row)["broken_tag_rate"] == 0.0, "the cut turn has lost its openings"
