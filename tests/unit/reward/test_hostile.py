"""Texts written to stall a worker, crash it or exhaust its memory. Tests assert bounds of work, not of time."""

from __future__ import annotations

import tracemalloc

import pytest

from forage_reward.parsing.sequence import MAX_STEPS, is_valid_sequence
from forage_reward.registry import REWARDS, bind_reward
from forage_reward.score import Status
from forage_reward.trajectory import GroundTruth, Role, Span, TrajectoryView

TRUTH = GroundTruth(("Oslo",), 7, (3, 4))
PURE = [name for name, reward in REWARDS.items() if not reward.blocking]
TWO_MB = 2_000_000
PIECES = ["<answer>", "</answer>", "<answer></answer>", "<think></think><search>q</search>", "-", "(", "a ", "\x00"]
PIECES += ["\ud800", "9", "<kg-query>", "<search><answer>", "<information>", "\n", "<|im_end|>", "Assistant:"]


@pytest.mark.parametrize("form", ["{}", "<think></think><answer>{}</answer>"], ids=["text", "answer"])
@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("name", PURE)
def test_two_megabytes_are_scored_in_proportional_memory(name: str, piece: str, form: str) -> None:
    view = TrajectoryView((Span(Role.MODEL, form.format(piece * (TWO_MB // len(piece)))),))
    size = len(view.spans[0].text.encode("utf-8", "surrogatepass"))
    tracemalloc.start()
    try:
        score = bind_reward(name, {}, "here")(view, TRUTH)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert score.status is Status.OK
    assert score.total < 1.0
    assert len(score.detail) < 1_000
    assert peak < 6 * size


@pytest.mark.parametrize(
    "answer", ["9**9**9", "-" * 100_000 + "3", "(" * 100_000, "9" * 1_000_000, "3\x00", "\ud800", "", "1e999999"]
)
@pytest.mark.parametrize("name", PURE)
def test_a_hostile_answer_is_a_wrong_answer(name: str, answer: str) -> None:
    score = bind_reward(name, {}, "here")(TrajectoryView((Span(Role.MODEL, f"<answer>{answer}</answer>"),)), TRUTH)
    assert score.status is Status.OK
    assert score.total <= 0.1


def test_a_sequence_beyond_the_limit_is_invalid() -> None:
    turn = "<think>t</think><search>q</search><information>d</information>"
    end = "<think>t</think><answer>a</answer>"
    assert is_valid_sequence(turn * 100 + end).valid
    result = is_valid_sequence(turn * MAX_STEPS + end)
    assert not result.valid
    assert str(MAX_STEPS) in result.reason
