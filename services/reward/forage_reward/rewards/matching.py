"""The score of a right, a wrong and a missing answer, for rewards that compare an answer with accepted ones."""

from __future__ import annotations

from forage_reward.reward import RewardParams
from forage_reward.score import Component, Score, sum_components


class MatchParams(RewardParams):
    """Values of a right and of a wrong answer; no answer earns 0."""

    score: float = 1.0
    format_score: float = 0.0


def score_match(
    reward: str, component: str, is_right: bool | None, params: MatchParams, wrong: str = "wrong answer"
) -> Score:
    """Build a score of one component, raw 1 for a right answer; `is_right` is None without an answer."""
    if is_right is None:
        return sum_components(reward, (Component(component, 0.0, 0.0),), "no answer")
    if is_right:
        return sum_components(reward, (Component(component, 1.0, params.score),), "right answer")
    return sum_components(reward, (Component(component, 0.0, params.format_score),), wrong)
