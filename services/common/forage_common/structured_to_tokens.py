"""Token rewards from a structured score: rewards of turns go to their own tokens, the rest to all tokens.

Pure functions over plain lists, one trajectory at a time. The two strategies differ in their sums by design (the sum
of turns, or their mean), so both are returned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

_TURN = re.compile(r"(?:.*\.)?turn_(\d+)")


class Strategy(StrEnum):
    """Tokens that get the reward."""

    TURN_PROPORTIONAL = "turn_proportional"
    FINAL_TOKEN_ONLY = "final_token_only"


class Component(Protocol):
    """One part of a score: its name, and its contribution to the total."""

    @property
    def name(self) -> str: ...

    @property
    def weighted(self) -> float: ...


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


def structured_reward(components: Sequence[Component]) -> StructuredReward:
    """Split a score's components, alone or within a composition, into turns and whole.

    `turn_<n>` and `<label>.turn_<n>` are turns. Their reward is their contribution times the number of turns of the
    label, since the total has their mean. All other names that do not start with "_" belong to the whole.
    """
    turns: dict[str, dict[int, float]] = {}
    whole = 0.0
    for component in components:
        if component.name.startswith("_"):
            continue
        match = _TURN.fullmatch(component.name)
        if match:
            turns.setdefault(component.name.rpartition(".")[0], {})[int(match[1])] = component.weighted
        else:
            whole += component.weighted
    summed: dict[int, float] = {}
    for parts in turns.values():
        for turn, weighted in parts.items():
            summed[turn] = summed.get(turn, 0.0) + weighted * len(parts)
    return StructuredReward(summed, whole)


def structured_to_tokens(
    reward: StructuredReward, loss_mask: Sequence[int], turn_ids: Sequence[int], strategy: Strategy
) -> TokenRewards:
    """Spread a reward over the tokens of a response.

    Args:
        loss_mask: 1 on tokens that the model generated, 0 elsewhere; shape (response,).
        turn_ids: the turn of each token from 1, -1 outside; shape (response,).

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
    if not valid:
        return TokenRewards(rewards, turn_sum, mean_sum, flagged=True)
    if strategy is Strategy.FINAL_TOKEN_ONLY:
        rewards[valid[-1]] = mean_sum
    else:
        for index in valid:
            rewards[index] = reward.whole / len(valid)
        for turn, indices in tokens.items():
            for index in indices:
                rewards[index] += reward.turns[turn] / len(indices)
    return TokenRewards(rewards, turn_sum, mean_sum, flagged=False)
