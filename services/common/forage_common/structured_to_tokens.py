"""A structured score as a reward on every token: what turns earned on their own tokens, the rest on all of them.

Pure functions over plain lists, one trajectory at a time. The two strategies give different sums on purpose (the
sum of turns against their mean), so both are returned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

_TURN = re.compile(r"(?:.*\.)?turn_(\d+)")


class Strategy(StrEnum):
    """Where the reward lands."""

    TURN_PROPORTIONAL = "turn_proportional"
    FINAL_TOKEN_ONLY = "final_token_only"


class Component(Protocol):
    """One part of a score: what it is called, and what it adds to the total."""

    @property
    def name(self) -> str: ...

    @property
    def weighted(self) -> float: ...


@dataclass(frozen=True)
class StructuredReward:
    """What turns earned, by number from 1, and what the whole trajectory earned (names with "_" left out)."""

    turns: Mapping[int, float]
    whole: float

    @property
    def mean_of_turns(self) -> float:
        return sum(self.turns.values()) / len(self.turns) if self.turns else 0.0


@dataclass(frozen=True)
class TokenRewards:
    """Rewards over the response's tokens.

    Attributes:
        rewards: one a token; 0 wherever the mask is 0.
        turn_sum: sum over turns that have tokens, plus the whole's: what `turn_proportional` hands out.
        mean_sum: mean over all turns, plus the whole's: what `final_token_only` hands out.
        flagged: no token could carry the reward.
    """

    rewards: list[float]
    turn_sum: float
    mean_sum: float
    flagged: bool


def structured_reward(components: Sequence[Component]) -> StructuredReward:
    """The parts of a score's components, alone or within a composition.

    `turn_<n>` and `<label>.turn_<n>` are turns: n times what each added to the total, for n turns of its label.
    All else whose name does not start with "_" belongs to the whole.
    """
    turns: dict[str, dict[int, float]] = {}
    whole = 0.0
    for component in components:
        if component.name.startswith("_"):
            continue
        found = _TURN.fullmatch(component.name)
        if found:
            turns.setdefault(component.name.rpartition(".")[0], {})[int(found[1])] = component.weighted
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
        loss_mask: 1 on tokens that the model wrote, 0 elsewhere; shape (response,).
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
        for turn, places in tokens.items():
            for index in places:
                rewards[index] += reward.turns[turn] / len(places)
    return TokenRewards(rewards, turn_sum, mean_sum, flagged=False)
