"""`f1`: how many words the last answer shares with the nearest accepted one. Partial credit for partial answers."""

from __future__ import annotations

from forage_common.text.answers import f1
from forage_reward.parsing.answers import extract_solution
from forage_reward.reward import Reward, RewardParams
from forage_reward.score import NO_TARGETS, Component, Score, Status, refused, scored
from forage_reward.trajectory import GroundTruth, TrajectoryView

NAME = "f1"


class Params(RewardParams):
    """What a perfect answer earns; others earn their share of it."""

    score: float = 1.0


def judge(view: TrajectoryView, truth: GroundTruth, params: Params) -> Score:
    """1 component: `f1`, raw from 0 to 1 over normalised words, the best over all accepted answers."""
    if not truth.targets:
        return refused(Status.INVALID_INPUT, NAME, NO_TARGETS)
    answer = extract_solution(view)
    if answer is None:
        return scored(NAME, (Component("f1", 0.0, 0.0),), "no answer")
    share = f1(answer, truth.targets)
    return scored(NAME, (Component("f1", share, params.score * share),), f"f1 {share:.3f}")


REWARD = Reward(NAME, "word F1 of the last <answer> with the nearest accepted answer", Params, judge)
