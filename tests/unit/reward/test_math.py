"""Mathematical equality, and answers that cannot be checked in time."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from forage_reward.parsing.math_answer import MAX_LENGTH, extract_math_answer, is_balanced
from forage_reward.registry import bind_reward
from forage_reward.rewards import math
from forage_reward.score import Score, Status
from forage_reward.trajectory import GroundTruth, Role, Span, TrajectoryView

ROWS = [json.loads(line) for line in (Path(__file__).parents[2] / "data/reward/math.jsonl").open()]


def compute_score(text: str, *targets: str, **params: float) -> Score:
    return bind_reward("math", params, "here")(TrajectoryView((Span(Role.MODEL, text),)), GroundTruth(targets))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ascii(row["answer"]))
def test_answers_are_compared_as_mathematics(row: dict[str, Any]) -> None:
    score = compute_score(f"<answer>{row['answer']}</answer>", *row["targets"], timeout_s=60.0)
    assert (score.status, score.total) == (Status.OK, row["want"]), score.detail


def test_an_answer_that_cannot_be_checked_has_no_score_and_the_next_one_has() -> None:
    score = compute_score("<answer>9!!!!!</answer>", "5", timeout_s=1.0)
    assert score.status in (Status.TIMEOUT, Status.INTERNAL)
    assert score.components == ()
    assert compute_score("<answer>4/8</answer>", "1/2", timeout_s=60.0).total == 1.0


def test_an_idle_process_that_was_killed_is_replaced() -> None:
    assert compute_score("<answer>4/8</answer>", "1/2", timeout_s=60.0).total == 1.0
    for child in math._POOL._idle:
        child.process.kill()
        child.process.wait()
    assert compute_score("<answer>5/10</answer>", "1/2", timeout_s=60.0).total == 1.0


def test_many_threads_share_few_processes() -> None:
    answers = [f"<answer>{n}/{2 * n}</answer>" for n in range(1, 25)]
    with ThreadPoolExecutor(8) as pool:
        scores = list(pool.map(lambda text: compute_score(text, "0.5", timeout_s=60.0), answers))
    assert [score.total for score in scores] == [1.0] * len(answers)
    assert len(math._POOL._idle) <= math.PROCESSES


def test_a_target_that_is_not_mathematics_is_invalid_input() -> None:
    score = compute_score("<answer>5</answer>", "", timeout_s=60.0)
    assert (score.status, score.components) == (Status.INVALID_INPUT, ())


def test_scores_have_the_parameters_of_the_route() -> None:
    weights = {"score": 2.0, "format_score": 0.5, "timeout_s": 60.0}
    assert compute_score("<answer>7</answer>", "7", **weights).total == 2.0
    assert compute_score("<answer>8</answer>", "7", **weights).total == 0.5
    assert compute_score("no answer", "7", **weights).total == 0.0
    assert compute_score(f"<answer>{'1+' * MAX_LENGTH}1</answer>", "7", **weights).total == 0.5


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("so \\boxed{1} and \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}} done", "\\frac{1}{2}"),
        ("<answer> 3 </answer> not \\boxed{4}", "3"),
        ("<answer>$ 3 $</answer>", "3"),
        ("<answer>\\boxed{5}</answer>", "5"),
        ("\\boxed{1", None),
        ("\\boxed{" + "{" * 10_000_000, None),
        ("7", None),
        ("<answer></answer>", ""),
    ],
    ids=range(9),
)
def test_the_answer_is_the_last_answer_block_or_the_last_box(text: str, want: str | None) -> None:
    assert extract_math_answer(TrajectoryView((Span(Role.MODEL, text),))) == want


def test_only_boxes_of_the_model_count() -> None:
    spans = (Span(Role.PROMPT, "\\boxed{1}"), Span(Role.MODEL, "hm"), Span(Role.ENV, "\\boxed{2}"))
    assert extract_math_answer(TrajectoryView(spans)) is None


@pytest.mark.parametrize(
    ("text", "want"), [("", True), ("{}", True), ("{", False), ("}", False), ("}{", False), ("{}}", False)]
)
def test_braces_must_be_balanced(text: str, want: bool) -> None:
    assert is_balanced(text) is want
