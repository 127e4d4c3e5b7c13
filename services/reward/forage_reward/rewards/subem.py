"""`subem`: an accepted answer is a substring of the last answer. More lenient than `em`, and open to long answers."""

from __future__ import annotations

from forage_reward.parsing.answers import extract_solution
from forage_reward.reward import Reward
from forage_reward.rewards.matching import MatchParams, score_match
from forage_reward.score import NO_TARGETS, Score, Status, withhold_score
from forage_reward.trajectory import GroundTruth, TrajectoryView
from forage_runtime.text.answers import subem_check

NAME = "subem"


def compute_score(view: TrajectoryView, truth: GroundTruth, params: MatchParams) -> Score:
    """Return 1 component: `substring_match`, raw 1 where an accepted answer is part of the answer."""
    if not truth.targets:
        return withhold_score(Status.INVALID_INPUT, NAME, NO_TARGETS)
    answer = extract_solution(view)
    return score_match(NAME, "substring_match", None if answer is None else subem_check(answer, truth.targets), params)


REWARD = Reward(NAME, "an accepted answer is part of the last <answer>", MatchParams, compute_score)
