"""Mathematical answers that exhaust the memory or the time of the process that checks them."""

from __future__ import annotations

from forage_reward.registry import bind_reward
from forage_reward.score import Score, Status
from forage_reward.trajectory import GroundTruth, Role, Span, TrajectoryView


def compute_score(answer: str, target: str, timeout_s: float) -> Score:
    view = TrajectoryView((Span(Role.MODEL, f"<answer>{answer}</answer>"),))
    return bind_reward("math", {"timeout_s": timeout_s}, "here")(view, GroundTruth((target,)))


def test_a_tower_of_powers_has_no_score_and_the_next_answer_is_scored() -> None:
    score = compute_score("9^{9^{9^{9}}}", "5", timeout_s=1.0)
    assert score.status in (Status.TIMEOUT, Status.INTERNAL)
    assert score.components == ()
    assert compute_score("4/8", "1/2", timeout_s=60.0).total == 1.0
