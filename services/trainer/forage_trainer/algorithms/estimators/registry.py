"""All estimators by their names in the settings, behind one signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_adv_est

from forage_runtime.errors import ForageError
from forage_runtime.settings import AdvantageEstimator, AlgorithmSettings
from forage_trainer.algorithms.estimators.gae import gae
from forage_trainer.algorithms.estimators.grpo import grpo_outcome
from forage_trainer.algorithms.estimators.grpo_multiturn import grpo_multiturn
from forage_trainer.algorithms.estimators.reinforce_plus_plus import reinforce_plus_plus
from forage_trainer.algorithms.estimators.rloo import rloo
from forage_trainer.extensions import ExtensionError, describe_given, load_function


class NonFiniteValueError(ForageError, ValueError):
    """A critic's value of a token that is trained on is NaN or infinite."""


@dataclass(frozen=True)
class Rewards:
    """The input of an estimator.

    token_rewards, mask: (rows, tokens); uids: group of each row.
    turn_ids: (rows, tokens) long, from 1, -1 outside turns.
    turn_rewards, whole_rewards: for each row, the rewards of its turns by turn id, and (rows,) the rest of its score.
    values: (rows, tokens), the critic's; None without a critic.
    ids: trajectory of each row, for errors; without them a row is named by its group.
    """

    token_rewards: torch.Tensor
    mask: torch.Tensor
    uids: Sequence[str]
    turn_ids: torch.Tensor
    turn_rewards: Sequence[Mapping[int, float]]
    whole_rewards: torch.Tensor
    values: torch.Tensor | None = None
    ids: Sequence[str] = ()


@dataclass(frozen=True)
class Advantages:
    """advantages, returns: (rows, tokens) float32, 0 outside the mask."""

    advantages: torch.Tensor
    returns: torch.Tensor


Estimator = Callable[[Rewards, AlgorithmSettings], Advantages]


def estimate_advantages(rewards: Rewards, settings: AlgorithmSettings) -> Advantages:
    """Estimate advantages by `settings.adv_estimator`.

    Rewards and values outside the mask are ignored; they may be NaN.

    Raises:
        ValueError: a reward is not finite, the mask is empty, or the estimator lacks the critic's values.
        NonFiniteValueError: a value is not finite; whitening would spread it over the whole batch.
    """
    mask = rewards.mask.bool()
    if not mask.any():
        raise ValueError("no token to train on: the mask is 0 everywhere")
    numbers = [rewards.token_rewards[mask], rewards.whole_rewards]
    numbers.append(torch.tensor([value for turns in rewards.turn_rewards for value in turns.values()]))
    if not all(part.isfinite().all() for part in numbers):
        raise ValueError("a reward is NaN or infinite: trajectories with such a score are invalid (data/tensors.py)")
    if rewards.values is not None and (bad := (mask & ~rewards.values.isfinite()).nonzero()).numel():
        row, token = bad[0].tolist()
        name = f"trajectory {rewards.ids[row]}" if rewards.ids else f"row {row} of group {rewards.uids[row]}"
        value = float(rewards.values[row, token])
        raise NonFiniteValueError(f"the critic's value of {name} is {value} at token {token} of its response")
    inside = replace(rewards, token_rewards=torch.where(mask, rewards.token_rewards, 0.0))
    if settings.estimator:
        return _estimate_by_user(inside, settings)
    return ESTIMATORS[settings.adv_estimator](inside, settings)


def _estimate_by_user(rewards: Rewards, settings: AlgorithmSettings) -> Advantages:
    """Call an estimator of the user's own, which gives advantages, or advantages and returns; 0 outside the mask.

    Raises:
        ExtensionError: it raised, or gave something else.
    """
    setting = "trainer.algorithm.estimator"
    given = load_function(setting, settings.estimator)(rewards, settings)
    pair = given if isinstance(given, tuple) else (given, given)
    mask, wrong = rewards.mask.bool(), "" if len(pair) == 2 else f"{len(pair)} values"
    for value in pair:
        if wrong:
            break
        if not isinstance(value, torch.Tensor) or value.shape != mask.shape:
            wrong = describe_given(value)
        elif not value[mask].isfinite().all():
            wrong = "a value that is NaN or infinite"
    if wrong:
        expected = f"a tensor of shape {tuple(mask.shape)}, or two: advantages and returns"
        raise ExtensionError(f"{setting} = '{settings.estimator}' gave {wrong}: expected {expected}")
    advantages, returns = (torch.where(mask, value.float(), 0.0) for value in pair)
    return Advantages(advantages, returns)


def _grpo(rewards: Rewards, settings: AlgorithmSettings) -> Advantages:
    advantages = grpo_outcome(rewards.token_rewards, rewards.mask, rewards.uids, settings.norm_adv_by_std_in_grpo)
    return Advantages(advantages, advantages)


def _grpo_multiturn(rewards: Rewards, settings: AlgorithmSettings) -> Advantages:
    advantages = grpo_multiturn(
        rewards.turn_rewards,
        rewards.whole_rewards,
        rewards.turn_ids,
        rewards.mask,
        rewards.uids,
        settings.turn_weight,
        settings.norm_adv_by_std_in_grpo,
    )
    return Advantages(advantages, advantages)


def _gae(rewards: Rewards, settings: AlgorithmSettings) -> Advantages:
    if rewards.values is None:
        raise ValueError("adv_estimator gae needs the values of a critic")
    return Advantages(*gae(rewards.token_rewards, rewards.values, rewards.mask, settings.gamma, settings.lam))


def _rloo(rewards: Rewards, settings: AlgorithmSettings) -> Advantages:
    advantages = rloo(rewards.token_rewards, rewards.mask, rewards.uids)
    return Advantages(advantages, advantages)


def _reinforce_plus_plus(rewards: Rewards, settings: AlgorithmSettings) -> Advantages:
    return Advantages(*reinforce_plus_plus(rewards.token_rewards, rewards.mask, settings.gamma))


ESTIMATORS: Mapping[AdvantageEstimator, Estimator] = {
    AdvantageEstimator.GRPO: _grpo,
    AdvantageEstimator.GRPO_MULTITURN: _grpo_multiturn,
    AdvantageEstimator.GAE: _gae,
    AdvantageEstimator.RLOO: _rloo,
    AdvantageEstimator.REINFORCE_PLUS_PLUS: _reinforce_plus_plus,
}


@register_adv_est(AdvantageEstimator.GRPO_MULTITURN.value)  # type: ignore[untyped-decorator, unused-ignore]
def _grpo_multiturn_for_verl(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[str],
    turn_ids: torch.Tensor,
    turn_rewards: Sequence[Mapping[int, float]],
    whole_rewards: torch.Tensor,
    norm_adv_by_std_in_grpo: bool = True,
    turn_weight: float = 0.5,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multi-turn GRPO in verl's registry, which has no such estimator; arguments have verl's names where it has one."""
    advantages = grpo_multiturn(
        turn_rewards, whole_rewards, turn_ids, response_mask, list(index), turn_weight, norm_adv_by_std_in_grpo
    )
    return advantages, advantages
