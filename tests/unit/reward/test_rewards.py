"""`em` and `search_r1_format` over whole trajectories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage_reward.parsing.raw_text import split_spans
from forage_reward.registry import REWARDS, bind_reward
from forage_reward.score import Score, Status
from forage_reward.trajectory import GroundTruth, Role, Span, TrajectoryView

DATA = Path(__file__).parents[2] / "data/reward/scores.jsonl"
ROWS = [json.loads(line) for line in DATA.read_text().splitlines()]
TURN = ("<think>t</think>\n<search>q</search>", "\n\n<information>{}</information>\n\n")
TRUTH = GroundTruth(("Oslo",), 7, (3, 4))
PURE = [name for name, reward in REWARDS.items() if not reward.blocking]
OF_TARGETS = [name for name in REWARDS if name != "countdown"]


def build_searched(passage: str, ending: str, end_of_turn: str = "") -> TrajectoryView:
    spans = (
        Span(Role.PROMPT, "q?\n<|im_start|>assistant\n"),
        Span(Role.MODEL, TURN[0]),
        Span(Role.ENV, TURN[1].format(passage)),
        Span(Role.MODEL, ending),
    )
    return TrajectoryView(spans, end_of_turn)


def compute_score(view: TrajectoryView, name: str = "search_r1_format", **params: float) -> Score:
    return bind_reward(name, params, "here")(view, TRUTH)


@pytest.mark.parametrize("row", ROWS)
def test_a_trajectory_earns_its_expected_reward(row: dict[str, Any]) -> None:
    view = TrajectoryView(
        split_spans(row["dump"]) if "dump" in row else tuple(Span(Role(role), text) for role, text in row["spans"])
    )
    score = bind_reward(row["reward"], row["params"], "here")(view, GroundTruth(tuple(row["targets"])))
    assert score.status is Status.OK
    assert score.total == pytest.approx(row["want"])


RIGHT, WRONG, BARE = "<think>t</think><answer>Oslo</answer>", "<think>t</think><answer>Rome</answer>", "no tags"
LAYERS = [
    (build_searched("Oslo is old", RIGHT), 8.0, {"exact_match": 1, "format": 1, "retrieval": 1}),
    (build_searched("Rome is old", RIGHT), 8.0, {"exact_match": 1, "format": 1, "retrieval": 0}),
    (build_searched("Oslo is old", WRONG), 5.0, {"exact_match": 0, "format": 1, "retrieval": 1}),
    (build_searched("Rome is old", WRONG), 4.0, {"exact_match": 0, "format": 1, "retrieval": 0}),
    (build_searched("Oslo is old", "but " + RIGHT), 4.0, {"exact_match": 1, "format": 0}),
    (build_searched("Oslo is old", "but " + WRONG), 2.0, {"exact_match": 0, "format": 0, "final_answer": 1}),
    (build_searched("Oslo is old", BARE), 0.0, {"exact_match": 0, "format": 0}),
]


@pytest.mark.parametrize(("view", "total", "raw"), LAYERS)
def test_every_layer_has_its_own_weight_and_component(
    view: TrajectoryView, total: float, raw: dict[str, float]
) -> None:
    weights = {"score": 8.0, "structure_format_score": 4.0, "final_format_score": 2.0, "retrieval_score": 1.0}
    score = compute_score(view, **weights)
    assert score.total == total
    assert {component.name: component.raw for component in score.components} == raw


@pytest.mark.parametrize(("view", "_", "raw"), LAYERS)
@pytest.mark.parametrize("name", PURE)
def test_the_weighted_components_add_up_to_the_total(name: str, view: TrajectoryView, _: float, raw: object) -> None:
    score = compute_score(view, name)
    assert score.total == pytest.approx(sum(component.weighted for component in score.components))


@pytest.mark.parametrize(
    ("ending", "end_of_turn", "total"),
    [
        (RIGHT + "<|im_end|>", "", 1.0),
        (RIGHT + "</s>", "</s>", 1.0),
        (RIGHT + "<|im_end|>", "</s>", 1.0),
        (RIGHT + "<|im_end|>\n", "<|im_end|>", 1.0),
        (RIGHT + "</s>", "", 0.8),
        (RIGHT + "<|im_end|><|im_end|>", "<|im_end|>", 0.8),
        ("<|im_end|>" + RIGHT, "<|im_end|>", 0.8),
    ],
)
def test_one_end_of_turn_marker_is_stripped_from_the_end(ending: str, end_of_turn: str, total: float) -> None:
    assert compute_score(build_searched("d", ending, end_of_turn)).total == pytest.approx(total)


def test_an_end_of_turn_in_a_separate_span_is_stripped() -> None:
    view = build_searched("d", RIGHT)
    assert compute_score(TrajectoryView((*view.spans, Span(Role.MODEL, "</s>")), "</s>")).total == 1.0


def test_a_blank_answer_is_an_answer() -> None:
    assert compute_score(build_searched("d", "<think>t</think><answer> </answer>")).detail.startswith("wrong answer")


@pytest.mark.parametrize("name", OF_TARGETS)
def test_without_accepted_answers_the_status_is_invalid_input(name: str) -> None:
    score = bind_reward(name, {}, "here")(build_searched("d", RIGHT), GroundTruth(countdown_target=3))
    assert score.status is Status.INVALID_INPUT
    assert "targets" in score.detail


def test_the_detail_quotes_the_violation_of_the_format() -> None:
    assert "'but'" in compute_score(build_searched("d", "but " + RIGHT)).detail


TAGS = [form.format(tag) for tag in ("think", "search", "information", "answer") for form in ("<{}>", "</{}>")]
texts = st.lists(
    st.sampled_from([*TAGS, "Oslo", " ", "\x00", "\u202e", "<|im_start|>assistant", "<|im_end|>", "Assistant:"]),
    max_size=12,
).map("".join) | st.text(max_size=40)
any_spans = st.lists(st.builds(Span, st.sampled_from(Role), texts), max_size=8).map(tuple)


@given(any_spans, st.lists(st.text(max_size=5), max_size=3).map(tuple), st.text(max_size=4))
def test_any_model_text_gets_a_bounded_score(
    spans: tuple[Span, ...], targets: tuple[str, ...], end_of_turn: str
) -> None:
    for name in PURE:
        truth = GroundTruth(targets, 7, (3, 4))
        score = bind_reward(name, {}, "here")(TrajectoryView(spans, end_of_turn), truth)
        assert score.status is (Status.OK if targets or name == "countdown" else Status.INVALID_INPUT)
        assert 0.0 <= score.total <= 1.0


@given(texts)
def test_the_spans_of_a_dump_concatenate_to_the_dump(text: str) -> None:
    assert "".join(span.text for span in split_spans(text)) == text


@given(any_spans, texts)
def test_environment_text_never_contains_an_answer(spans: tuple[Span, ...], injected: str) -> None:
    def match(view: TrajectoryView) -> float:
        return compute_score(view, "em").total

    before = match(TrajectoryView((*spans, Span(Role.ENV, ""))))
    assert match(TrajectoryView((*spans, Span(Role.ENV, injected)))) == before


@pytest.mark.parametrize("piece", ["<answer>", "</answer>", "<information>", "<answer></answer>", "a ", "\x00", "((("])
def test_megabytes_of_model_text_are_scored_in_linear_time(piece: str) -> None:
    huge = piece * (4_000_000 // len(piece))
    view = TrajectoryView((Span(Role.MODEL, huge), Span(Role.ENV, f"<information>{huge}</information>")))
    for name in PURE:
        assert bind_reward(name, {}, "here")(view, TRUTH).status is Status.OK
