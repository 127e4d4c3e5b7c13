"""A trajectory's score as rewards of its tokens: rewards of turns go to their own tokens, the rest to all tokens.

The two placements differ in their sums by design (the sum of turns, or their mean), so both are returned.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forage_proto.v1.trajectory_pb2 import Score
from forage_runtime.settings import RewardPlacement
from forage_trajectory.trajectory import Trajectory

_TURN = re.compile(r"(?:.*\.)?turn_(\d+)")


@dataclass(frozen=True)
class StructuredReward:
    """Rewards of turns, by number from 1, and of the whole trajectory; components named "_…" are left out."""

    turns: Mapping[int, float]
    whole: float

    @property
    def mean_of_turns(self) -> float:
        return sum(self.turns.values()) / len(self.turns) if self.turns else 0.0

    def sum_turns(self, present: Iterable[int]) -> float:
        """Sum the rewards of the turns among `present`, and that of the whole."""
        return sum(self.turns[turn] for turn in present if turn >= 1 and turn in self.turns) + self.whole


@dataclass(frozen=True)
class TokenRewards:
    """Rewards over the response's tokens.

    Attributes:
        rewards: one per token, (response,) float64; 0 where the mask is 0.
        turn_sum: sum over turns that have tokens, plus the whole: the total of `turn_proportional`.
        mean_sum: mean over all turns, plus the whole: the total of `final_token_only`.
        flagged: no token could carry the reward.
    """

    rewards: npt.NDArray[np.float64]
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


def compute_turn_sum(trajectory: Trajectory) -> float:
    """Compute `TokenRewards.turn_sum` without the rewards of tokens."""
    return to_structured_reward(trajectory.score).sum_turns(trajectory.list_turns())


def compute_token_rewards(trajectory: Trajectory, placement: RewardPlacement) -> TokenRewards:
    """Place the score on the response's state tokens, one without turns on the last; raises as `place_reward` does."""
    reward = to_structured_reward(trajectory.score)
    placement = placement if reward.turns else RewardPlacement.FINAL_TOKEN_ONLY
    return place_reward(reward, *trajectory.read_mask(), placement)


def place_reward(
    reward: StructuredReward,
    loss_mask: Sequence[int] | npt.NDArray[np.int32],
    turn_ids: Sequence[int] | npt.NDArray[np.int32],
    placement: RewardPlacement,
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
    valid = np.flatnonzero(loss_mask)
    own = np.asarray(turn_ids, np.int32)[valid]
    # In the order of their tokens: sums are rounded in that order.
    present = [turn for turn in dict.fromkeys(own.tolist()) if turn >= 1 and turn in reward.turns]
    mean_sum = reward.mean_of_turns + reward.whole
    rewards = np.zeros(len(loss_mask))
    if len(valid) and placement is RewardPlacement.FINAL_TOKEN_ONLY:
        rewards[valid[-1]] = mean_sum
    elif len(valid):
        rewards[valid] = reward.whole / len(valid)
        for turn in present:
            of_turn = valid[own == turn]
            rewards[of_turn] += reward.turns[turn] / len(of_turn)
    return TokenRewards(rewards, reward.sum_turns(present), mean_sum, flagged=not len(valid))
