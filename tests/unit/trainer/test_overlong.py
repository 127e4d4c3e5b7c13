"""Soft overlong penalty and overlong filtering (DAPO) against NumPy, and what a step does with them."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("verl", reason="needs the trainer's environment")
import torch
from overlong_parts import LENGTHS, REWARDS, build

from forage_runtime.errors import SettingsError
from forage_runtime.settings import AlgorithmSettings, OverlongSettings, load_settings
from forage_trainer.algorithms.estimators.registry import Rewards, estimate_advantages
from forage_trainer.data.overlong import compute_penalties, mask_cut, subtract_penalties


def penalize(length: int, most: int, buffer: int, factor: float) -> float:
    """Equation 13 of DAPO, with its 1 as a factor, and with the sign of a loss."""
    if length <= most - buffer:
        return 0.0
    if length <= most:
        return (length - (most - buffer)) / buffer * factor
    return factor


@pytest.mark.parametrize(("most", "buffer", "factor"), [(12, 4, 1.0), (13, 6, 0.5), (9, 1, 2.0), (5, 2, 1.0)])
def test_penalties_equal_the_paper(most: int, buffer: int, factor: float) -> None:
    settings = OverlongSettings(buffer_len=buffer, max_len=most, penalty_factor=factor)
    lengths = torch.arange(0, 30)
    expected = [penalize(int(length), most, buffer, factor) for length in lengths]
    np.testing.assert_allclose(compute_penalties(lengths, settings).numpy(), expected, rtol=0, atol=1e-12)
    assert not compute_penalties(lengths, OverlongSettings()).any()


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "grpo_multiturn"])
def test_advantages_are_those_of_rewards_less_the_penalty(estimator: str) -> None:
    algorithm = AlgorithmSettings.model_validate(
        {"adv_estimator": estimator, "overlong": {"buffer_len": 4, "max_len": 12, "penalty_factor": 0.8}}
    )
    tensors, group = build(algorithm)
    penalties = np.array([penalize(length, 12, 4, 0.8) for length in LENGTHS])
    result, metrics = subtract_penalties(tensors, algorithm.overlong)
    totals = np.array(REWARDS) - penalties
    np.testing.assert_allclose(result.token_rewards.sum(-1).numpy(), totals, rtol=0, atol=1e-12)
    np.testing.assert_allclose(result.whole_rewards.numpy(), totals, rtol=0, atol=1e-12)
    assert metrics == pytest.approx({"overlong_penalty_mean": penalties.mean(), "overlong_penalty_share": 0.5 + 1 / 6})
    rewards = Rewards(
        token_rewards=result.token_rewards,
        mask=result.mask,
        uids=result.uids,
        turn_ids=result.turn_ids,
        turn_rewards=result.turn_rewards,
        whole_rewards=result.whole_rewards,
        values=None,
        ids=[t.id for t in group.trajectories],
    )
    advantages = estimate_advantages(rewards, algorithm).advantages
    others = (totals.sum() - totals) / (len(totals) - 1)
    expected = totals - others if estimator == "rloo" else (totals - totals.mean()) / (totals.std(ddof=1) + 1e-6)
    first = advantages[torch.arange(len(totals)), 0].numpy()
    np.testing.assert_allclose(first, expected, rtol=1e-5, atol=1e-6)
    assert [t.score.total for t in group.trajectories] == list(REWARDS), "scores, and what reads them, know no penalty"


def test_a_reward_of_turns_keeps_them_and_loses_the_penalty_once() -> None:
    algorithm = AlgorithmSettings(overlong=OverlongSettings(buffer_len=4, max_len=12))
    tensors, _ = build(algorithm)
    result, _ = subtract_penalties(tensors, algorithm.overlong)
    changed = (result.token_rewards != tensors.token_rewards).sum(-1)
    assert changed.tolist() == [int(length > 8) for length in LENGTHS]
    last = [int(row.nonzero().max()) for row in tensors.state]
    for row, length in enumerate(LENGTHS):
        if length > 8:
            assert result.token_rewards[row, last[row]] != tensors.token_rewards[row, last[row]]


def test_a_batch_of_cut_trajectories_gives_no_update() -> None:
    tensors, group = build(AlgorithmSettings(), unfinished=tuple(range(len(LENGTHS))))
    assert mask_cut(tensors, group.trajectories) == (None, len(LENGTHS))
    whole, group = build(AlgorithmSettings())
    assert mask_cut(whole, group.trajectories) == (whole, 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["buffer_len=10"], "buffer_len = 10 tokens below max_len = 0: give max_len"),
        (["buffer_len=10", "max_len=10"], "give max_len"),
        (["max_len=10"], "buffer_len = 0 is none: give buffer_len"),
        (["penalty_factor=2"], "give buffer_len"),
        (["buffer_len=10", "max_len=20", "penalty_factor=0"], "penalty_factor"),
    ],
)
def test_a_penalty_without_a_length_is_refused(given: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(None, [f"trainer.algorithm.overlong.{one}" for one in given], {})
