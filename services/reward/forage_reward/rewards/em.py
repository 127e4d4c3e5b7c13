"""`em`: exact match of the last answer with any accepted one. Validation uses it too."""

from __future__ import annotations

from forage_reward.parsing.answers import extract_solution
from forage_reward.reward import Reward
from forage_reward.rewards.matching import MatchParams, score_match
from forage_reward.score import NO_TARGETS, Score, Status, withhold_score
from forage_reward.trajectory import GroundTruth, TrajectoryView
from forage_runtime.text.answers import em_check

NAME = "em"


def compute_score(view: TrajectoryView, truth: GroundTruth, params: MatchParams) -> Score:
    """Return 1 component: `exact_match`, raw 1 where the answer is right."""
    if not truth.targets:
        return withhold_score(Status.INVALID_INPUT, NAME, NO_TARGETS)
    answer = extract_solution(view)
    return score_match(NAME, "exact_match", None if answer is None else em_check(answer, truth.targets), params)


REWARD = Reward(NAME, "exact match of the last <answer> with any accepted answer", MatchParams, compute_score)
