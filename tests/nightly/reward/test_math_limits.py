"""The processes that check mathematical answers: some exhaust their memory or time, some are killed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from forage_reward.registry import bind_reward
from forage_reward.rewards import math
from forage_reward.score import Score, Status
from forage_reward.trajectory import GroundTruth, Role, Span, TrajectoryView


def compute_score(text: str, target: str, timeout_s: float) -> Score:
    view = TrajectoryView((Span(Role.MODEL, text),))
    return bind_reward("math", {"timeout_s": timeout_s}, "here")(view, GroundTruth((target,)))


@pytest.mark.parametrize("answer", ["9^{9^{9^{9}}}", "9!!!!!"])
def test_an_answer_that_cannot_be_checked_has_no_score_and_the_next_one_has(answer: str) -> None:
    score = compute_score(f"<answer>{answer}</answer>", "5", timeout_s=1.0)
    assert score.status in (Status.TIMEOUT, Status.INTERNAL)
    assert score.components == ()
    assert compute_score("<answer>4/8</answer>", "1/2", timeout_s=300.0).total == 1.0


def test_an_idle_process_that_was_killed_is_replaced() -> None:
    assert compute_score("<answer>4/8</answer>", "1/2", timeout_s=300.0).total == 1.0
    for child in math._POOL._idle:
        child.process.kill()
        child.process.wait()
    assert compute_score("<answer>5/10</answer>", "1/2", timeout_s=300.0).total == 1.0


def test_many_threads_share_few_processes() -> None:
    answers = [f"<answer>{n}/{2 * n}</answer>" for n in range(1, 25)]
    with ThreadPoolExecutor(8) as pool:
        scores = list(pool.map(lambda text: compute_score(text, "0.5", timeout_s=300.0), answers))
    assert [score.total for score in scores] == [1.0] * len(answers)
    assert len(math._POOL._idle) <= math.PROCESSES
