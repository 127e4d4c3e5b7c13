"""`subem`: an accepted answer stands anywhere in the last answer. Kinder than `em`, and open to long answers."""

from __future__ import annotations

from forage_common.text.answers import subem_check
from forage_reward.parsing.answers import extract_solution
from forage_reward.reward import Reward, RewardParams
from forage_reward.score import NO_TARGETS, Component, Score, Status, refused, scored
from forage_reward.trajectory import GroundTruth, TrajectoryView

NAME = "subem"


class Params(RewardParams):
    """What a right and a wrong answer earn; no answer earns 0."""

    score: float = 1.0
    format_score: float = 0.0


def judge(view: TrajectoryView, truth: GroundTruth, params: Params) -> Score:
    """1 component: `substring_match`, raw 1 where an accepted answer is part of the answer."""
    if not truth.targets:
        return refused(Status.INVALID_INPUT, NAME, NO_TARGETS)
    answer = extract_solution(view)
    if answer is None:
        return scored(NAME, (Component("substring_match", 0.0, 0.0),), "no answer")
    if subem_check(answer, truth.targets):
        return scored(NAME, (Component("substring_match", 1.0, params.score),), "right answer")
    return scored(NAME, (Component("substring_match", 0.0, params.format_score),), "wrong answer")


REWARD = Reward(NAME, "an accepted answer is part of the last <answer>", Params, judge)
