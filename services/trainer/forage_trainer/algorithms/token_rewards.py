"""A trajectory's score as rewards of its tokens: rewards of turns go to their own tokens, the rest to all tokens.

The two placements differ in their sums by design (the sum of turns, or their mean), so both are returned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forage_common.settings import RewardPlacement
from forage_common.v1.trajectory_pb2 import Score, Trajectory

_TURN = re.compile(r"(?:.*\.)?turn_(\d+)")


@dataclass(frozen=True)
class StructuredReward:
    """Rewards of turns, by number from 1, and of the whole trajectory; components named "_…" are left out."""

    turns: Mapping[int, float]
    whole: float

    @property
    def mean_of_turns(self) -> float:
        return sum(self.turns.values()) / len(self.turns) if self.turns else 0.0


@dataclass(frozen=True)
class TokenRewards:
    """Rewards over the response's tokens.

    Attributes:
        rewards: one per token, shape (response,); 0 where the mask is 0.
        turn_sum: sum over turns that have tokens, plus the whole: the total of `turn_proportional`.
        mean_sum: mean over all turns, plus the whole: the total of `final_token_only`.
        flagged: no token could carry the reward.
    """

    rewards: list[float]
    turn_sum: float
    mean_sum: float
    flagged: bool


def to_structured_reward(score: Score) -> StructuredReward:
    """Split a score into rewards of turns and of the whole; without turns all of it belongs to the whole.

    `turn_<n>` and, within a composition, `<label>.turn_<n>` are turns. Their reward is their contribution times the
    number of turns of the label, since the total has their mean. All other names that do not start with "_" belong to
    the whole.
    """
    turns: dict[str, dict[int, float]] = {}
    whole = 0.0
    for component in score.components:
        if component.name.startswith("_"):
            continue
        if match := _TURN.fullmatch(component.name):
            turns.setdefault(component.name.rpartition(".")[0], {})[int(match[1])] = component.weighted
        else:
            whole += component.weighted
    if not turns:
        return StructuredReward({}, score.total)
    summed: dict[int, float] = {}
    for parts in turns.values():
        for turn, weighted in parts.items():
            summed[turn] = summed.get(turn, 0.0) + weighted * len(parts)
    return StructuredReward(summed, whole)


def compute_token_rewards(trajectory: Trajectory, placement: RewardPlacement) -> TokenRewards:
    """Place the score on the response's state tokens, one without turns on the last; raises as `place_reward` does."""
    reward = to_structured_reward(trajectory.score)
    placement = placement if reward.turns else RewardPlacement.FINAL_TOKEN_ONLY
    return place_reward(reward, list(trajectory.loss_mask), list(trajectory.turn_ids), placement)


def place_reward(
    reward: StructuredReward, loss_mask: Sequence[int], turn_ids: Sequence[int], placement: RewardPlacement
) -> TokenRewards:
    """Spread a reward over the tokens of a response.

    Args:
        loss_mask: 1 on tokens that the model generated, 0 elsewhere; shape (response,).
        turn_ids: the turn of each token from 1, -1 outside; shape (response,).
        placement: turn_proportional or final_token_only.

    Raises:
        ValueError: the mask and the turn ids have different lengths.
    """
    if len(loss_mask) != len(turn_ids):
        raise ValueError(f"{len(loss_mask)} mask values but {len(turn_ids)} turn ids: both run over the response")
    valid = [index for index, mask in enumerate(loss_mask) if mask]
    tokens: dict[int, list[int]] = {}
    for index in valid if reward.turns else ():
        if turn_ids[index] in reward.turns and turn_ids[index] >= 1:
            tokens.setdefault(turn_ids[index], []).append(index)
    turn_sum = sum(reward.turns[turn] for turn in tokens) + reward.whole
    mean_sum = reward.mean_of_turns + reward.whole
    rewards = [0.0] * len(loss_mask)
    if valid and placement is RewardPlacement.FINAL_TOKEN_ONLY:
        rewards[valid[-1]] = mean_sum
    elif valid:
        for index in valid:
            rewards[index] = reward.whole / len(valid)
        for turn, indices in tokens.items():
            for index in indices:
                rewards[index] += reward.turns[turn] / len(indices)
    return TokenRewards(rewards, turn_sum, mean_sum, flagged=not valid)
