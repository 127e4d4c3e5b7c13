"""A trajectory's score as a reward on its tokens."""

from __future__ import annotations

from forage_common.settings import RewardPlacement
from forage_common.structured_to_tokens import (
    Strategy,
    StructuredReward,
    TokenRewards,
    structured_reward,
    structured_to_tokens,
)
from forage_common.v1.trajectory_pb2 import Score, Trajectory


def reward_of(score: Score) -> StructuredReward:
    """What turns earned and what the whole did; a score without turns is all of the whole."""
    found = structured_reward(score.components)
    return found if found.turns else StructuredReward({}, score.total)


def token_rewards(trajectory: Trajectory, placement: RewardPlacement) -> TokenRewards:
    """The score over the response's tokens, on state tokens only.

    A score with turns lands where `placement` says (turn_proportional or final_token_only), any other on the last
    state token.

    Raises:
        ValueError: `placement` is auto, or mask and turn ids differ in length.
    """
    reward = reward_of(trajectory.score)
    strategy = Strategy(placement.value) if reward.turns else Strategy.FINAL_TOKEN_ONLY
    return structured_to_tokens(reward, list(trajectory.loss_mask), list(trajectory.turn_ids), strategy)
