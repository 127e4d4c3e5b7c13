"""`f1`: word overlap of the last answer with the closest accepted one; partial credit for partial answers."""

from __future__ import annotations

from forage_reward.parsing.answers import extract_solution
from forage_reward.reward import Reward, RewardParams
from forage_reward.score import NO_TARGETS, Component, Score, Status, sum_components, withhold_score
from forage_reward.trajectory import GroundTruth, TrajectoryView
from forage_runtime.text.answers import f1

NAME = "f1"


class Params(RewardParams):
    """The value of a perfect answer; others earn their share of it."""

    score: float = 1.0


def compute_score(view: TrajectoryView, truth: GroundTruth, params: Params) -> Score:
    """Return 1 component: `f1`, raw from 0 to 1 over normalised words, the best over all accepted answers."""
    if not truth.targets:
        return withhold_score(Status.INVALID_INPUT, NAME, NO_TARGETS)
    answer = extract_solution(view)
    if answer is None:
        return sum_components(NAME, (Component("f1", 0.0, 0.0),), "no answer")
    overlap = f1(answer, truth.targets)
    return sum_components(NAME, (Component("f1", overlap, params.score * overlap),), f"f1 {overlap:.3f}")


REWARD = Reward(NAME, "word F1 of the last <answer> with the nearest accepted answer", Params, compute_score)
