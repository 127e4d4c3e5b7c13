"""A trajectory's score as rewards of its tokens."""

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


def to_structured_reward(score: Score) -> StructuredReward:
    """Split a score into rewards of turns and of the whole; without turns all of it belongs to the whole."""
    reward = structured_reward(score.components)
    return reward if reward.turns else StructuredReward({}, score.total)


def compute_token_rewards(trajectory: Trajectory, placement: RewardPlacement) -> TokenRewards:
    """Place the score on the response's state tokens.

    A score with turns is placed as `placement` says (turn_proportional or final_token_only), any other on the last
    state token.

    Raises:
        ValueError: `placement` is auto, or mask and turn ids differ in length.
    """
    reward = to_structured_reward(trajectory.score)
    strategy = Strategy(placement.value) if reward.turns else Strategy.FINAL_TOKEN_ONLY
    return structured_to_tokens(reward, list(trajectory.loss_mask), list(trajectory.turn_ids), strategy)
