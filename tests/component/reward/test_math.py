"""Mathematical equality, and answers that cannot be checked in time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forage_proto.v1 import reward_pb2, trajectory_pb2
from forage_reward.parsing.math_answer import MAX_LENGTH
from forage_reward.registry import bind_reward
from forage_reward.router import RewardRouter
from forage_reward.score import Score, Status
from forage_reward.trajectory import GroundTruth, Role, Span, TrajectoryView
from forage_runtime.settings import RewardSettings

ROWS = [json.loads(line) for line in (Path(__file__).parents[2] / "data/reward/math.jsonl").open()]


def compute_score(text: str, *targets: str, **params: float | str) -> Score:
    return bind_reward("math", params, "here")(TrajectoryView((Span(Role.MODEL, text),)), GroundTruth(targets))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ascii(row["answer"]))
def test_answers_are_compared_as_mathematics(row: dict[str, Any]) -> None:
    score = compute_score(f"<answer>{row['answer']}</answer>", *row["targets"], timeout_s=300.0)
    assert (score.status, score.total) == (Status.OK, row["want"]), score.detail


def test_a_percentage_is_the_number_or_the_fraction_but_never_both() -> None:
    for answer, target in [("10%", "0.1"), ("0.1", "10\\%"), ("12.5 %", "\\frac{1}{8}")]:
        assert compute_score(f"<answer>{answer}</answer>", target, timeout_s=300.0, percent="fraction").total == 1.0
        assert compute_score(f"<answer>{answer}</answer>", target, timeout_s=300.0, percent="number").total == 0.0
    assert compute_score("<answer>10%</answer>", "10", timeout_s=300.0, percent="fraction").total == 0.0
    assert compute_score("<answer>10%</answer>", "10", timeout_s=300.0).total == 1.0


@pytest.mark.parametrize("composed", [False, True])
def test_a_route_with_math_validates_by_it_with_exact_match_beside_it(composed: bool) -> None:
    own = {"name": "math", "params": {"timeout_s": 300.0, "format_score": 0.5}}
    parts = [{**own, "label": "m", "weight": 0.3}, {"name": "f1"}]
    route = RewardSettings.model_validate({"routes": {"gsm8k": parts if composed else own}}).routes
    router = RewardRouter(route)
    seen = {}
    for answer in ("27", "-27", "\\frac{54}{2}", None):
        text = "no answer" if answer is None else f"<answer>{answer}</answer>"
        item = reward_pb2.ScoreItem(
            data_source="gsm8k",
            spans=[trajectory_pb2.Span(role=trajectory_pb2.ROLE_MODEL, text=text)],
            ground_truth=trajectory_pb2.GroundTruth(targets=["-27"]),
        )
        score = router.score(item).validation_score
        assert (score.status, score.reward) == (trajectory_pb2.STATUS_OK, "math")
        seen[answer] = (score.total, *((part.name, part.raw) for part in score.components))
    assert seen == {
        "27": (0.0, ("equal", 0.0), ("em", 1.0)),
        "-27": (1.0, ("equal", 1.0), ("em", 1.0)),
        "\\frac{54}{2}": (0.0, ("equal", 0.0), ("em", 0.0)),
        None: (0.0, ("equal", 0.0), ("em", 0.0)),
    }


def test_a_target_that_is_not_mathematics_is_invalid_input() -> None:
    score = compute_score("<answer>5</answer>", "", timeout_s=300.0)
    assert (score.status, score.components) == (Status.INVALID_INPUT, ())


def test_scores_have_the_parameters_of_the_route() -> None:
    weights = {"score": 2.0, "format_score": 0.5, "timeout_s": 60.0}
    assert compute_score("<answer>7</answer>", "7", **weights).total == 2.0
    assert compute_score("<answer>8</answer>", "7", **weights).total == 0.5
    assert compute_score("no answer", "7", **weights).total == 0.0
    assert compute_score(f"<answer>{'1+' * MAX_LENGTH}1</answer>", "7", **weights).total == 0.5
