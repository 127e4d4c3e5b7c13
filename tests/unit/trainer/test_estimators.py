"""Every estimator against an oracle in NumPy, verl's own where it has one, and the specification's examples."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from arrived_groups import arrive_scored
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from forage_proto.v1.trajectory_pb2 import Component, Score
from forage_runtime.settings import AdvantageEstimator, AlgorithmSettings, RewardPlacement
from forage_trainer.algorithms.estimators.gae import gae
from forage_trainer.algorithms.estimators.groups import find_participants
from forage_trainer.algorithms.estimators.grpo import grpo_outcome
from forage_trainer.algorithms.estimators.grpo_multiturn import grpo_multiturn
from forage_trainer.algorithms.estimators.registry import ESTIMATORS, NonFiniteValueError, Rewards, estimate_advantages
from forage_trainer.algorithms.token_rewards import compute_token_rewards

DATA = Path(__file__).parents[2] / "data/trainer"
NAN = {"$nan": math.nan}


def load_examples(name: str) -> Any:
    rows = [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
    return pytest.mark.parametrize("example", rows, ids=lambda e: e["id"])


def build_matrix(rows: Sequence[Sequence[float | str]]) -> torch.Tensor:
    return torch.tensor(
        [[NAN.get(v, v) if isinstance(v, str) else v for v in row] for row in rows], dtype=torch.float32
    )


def build_outcomes(example: dict[str, Any]) -> torch.Tensor:
    sums = [sum(v for name, v in parts.items() if not name.startswith("_")) for parts in example["whole"]]
    return torch.tensor(sums, dtype=torch.double)


def build_rewards(token_rewards: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> Rewards:
    uids = tuple("a" * len(mask))
    return Rewards(token_rewards, mask, uids, mask.long(), [{}] * len(mask), token_rewards.nansum(-1), values)


# The specification's examples.


@load_examples("gae")
def test_gae_follows_the_specification(example: dict[str, Any]) -> None:
    rewards, values, mask = (build_matrix(example[name]) for name in ("token_rewards", "values", "mask"))
    algorithm = AlgorithmSettings(adv_estimator="gae", gamma=example["gamma"], lam=example["lam"])
    if example["error"]:
        with pytest.raises(ValueError, match=r"NaN|mask"):
            estimate_advantages(build_rewards(rewards, mask, values), algorithm)
        return
    result = estimate_advantages(build_rewards(rewards, mask, values), algorithm)
    inside = mask.bool()
    torch.testing.assert_close(
        result.advantages[inside], build_matrix(example["advantages"])[inside], atol=1e-5, rtol=0
    )
    torch.testing.assert_close(result.returns[inside], build_matrix(example["returns"])[inside], atol=1e-5, rtol=0)


@load_examples("grpo_outcome")
def test_grpo_follows_the_specification(example: dict[str, Any]) -> None:
    result = grpo_outcome(build_matrix(example["token_rewards"]), build_matrix(example["mask"]), example["uids"])
    torch.testing.assert_close(result, build_matrix(example["advantages"]), atol=1e-5, rtol=0)


@load_examples("grpo_multiturn")
def test_multi_turn_grpo_follows_the_specification(example: dict[str, Any]) -> None:
    turns = [{int(turn): value for turn, value in pairs} for pairs in example["turn_rewards"]]
    result = grpo_multiturn(
        turns,
        build_outcomes(example),
        torch.tensor(example["turn_ids"]),
        build_matrix(example["mask"]),
        example["uids"],
    )
    torch.testing.assert_close(result, build_matrix(example["advantages"]), atol=1e-5, rtol=0)


@load_examples("grpo_uniform")
def test_grpo_over_a_score_with_turns_follows_the_specification(example: dict[str, Any]) -> None:
    rows = []
    for pairs, parts, mask, turn_ids in zip(
        example["turn_rewards"], example["whole"], example["mask"], example["turn_ids"], strict=True
    ):
        turns = [Component(name=f"turn_{turn}", weighted=value / len(pairs)) for turn, value in pairs]
        score = Score(components=[*turns, *(Component(name=name, weighted=value) for name, value in parts.items())])
        trajectory = arrive_scored(mask, turn_ids, score)
        rows.append(compute_token_rewards(trajectory, RewardPlacement.TURN_PROPORTIONAL).rewards)
    result = grpo_outcome(torch.tensor(rows), build_matrix(example["mask"]), example["uids"])
    torch.testing.assert_close(result, build_matrix(example["advantages"]), atol=1e-5, rtol=0)


# Oracles, written from the formulas in NumPy.

Case = dict[str, Any]
scores = st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.8, 1.0, -0.5])


@st.composite
def draw_cases(draw: st.DrawFn) -> Case:
    """Rows in groups, each with two tokens to train on or more, in turns with observations between them."""
    rows, columns = draw(st.integers(2, 8)), draw(st.integers(2, 7))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mask = (numbers.random((rows, columns)) < 0.6).astype(int)
    mask[:, :2] = 1
    turn_ids = np.where(mask == 1, 1 + np.cumsum(mask == 0, axis=1), -1)
    turns = [{int(t): float(numbers.choice([0, 0.15, 0.25])) for t in set(row[row > 0])} for row in turn_ids]
    return {
        "rewards": draw(st.lists(scores, min_size=rows, max_size=rows)),
        "token_rewards": numbers.choice([0.0, 0.1, 0.5, 1.0, -0.5], (rows, columns)) * mask,
        "values": numbers.normal(size=(rows, columns)).round(3),
        "mask": mask,
        "turn_ids": turn_ids,
        "turns": turns,
        "whole": numbers.choice([0.0, 0.3, 0.7], rows),
        "uids": [str(u) for u in numbers.integers(0, 3, rows)],
        "gamma": draw(st.sampled_from([1.0, 0.99, 0.5, 0.0])),
        "lam": draw(st.sampled_from([1.0, 0.95, 0.0])),
        "by_std": draw(st.booleans()),
    }


def list_members(uids: Sequence[str]) -> dict[str, list[int]]:
    result: dict[str, list[int]] = defaultdict(list)
    for row, uid in enumerate(uids):
        result[uid].append(row)
    return result


def standardize(value: float, pool: Sequence[float], by_std: bool) -> float:
    mean, std = (np.mean(pool), np.std(pool, ddof=1)) if len(pool) > 1 else (0.0, 1.0)
    return float((value - mean) / (std + 1e-6) if by_std else value - mean)


def whiten(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    inside = values[mask == 1]
    return np.where(mask == 1, (values - inside.mean()) / np.sqrt(inside.var(ddof=1) + 1e-8), 0.0)


def compute_grpo(case: Case) -> tuple[np.ndarray, np.ndarray]:
    total, group = case["token_rewards"].sum(1), list_members(case["uids"])
    result = [standardize(total[i], total[group[uid]], case["by_std"]) for i, uid in enumerate(case["uids"])]
    return (np.array(result)[:, None] * case["mask"],) * 2


def compute_multiturn(case: Case) -> tuple[np.ndarray, np.ndarray]:
    result, group = np.zeros(case["mask"].shape), list_members(case["uids"])
    for i, uid in enumerate(case["uids"]):
        pool = [value for row in group[uid] for value in case["turns"][row].values()]
        for t in range(result.shape[1]):
            turn = int(case["turn_ids"][i, t])
            if case["mask"][i, t]:
                result[i, t] = 0.5 * standardize(case["turns"][i][turn], pool, case["by_std"])
                result[i, t] += standardize(case["whole"][i], case["whole"][group[uid]], case["by_std"])
    return result, result


def compute_gae(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The textbook recursion over each row's state tokens alone, as if nothing stood between them."""
    raw = np.zeros(case["mask"].shape)
    for i, row in enumerate(case["mask"]):
        places, after, value = np.flatnonzero(row), 0.0, 0.0
        for t in places[::-1]:
            delta = case["token_rewards"][i, t] + case["gamma"] * value - case["values"][i, t]
            after = delta + case["gamma"] * case["lam"] * after
            raw[i, t], value = after, case["values"][i, t]
    return whiten(raw, case["mask"]), (raw + case["values"]) * case["mask"]


def compute_rloo(case: Case) -> tuple[np.ndarray, np.ndarray]:
    total, group, result = case["token_rewards"].sum(1), list_members(case["uids"]), []
    for i, uid in enumerate(case["uids"]):
        others = [total[j] for j in group[uid] if j != i]
        result.append(total[i] - (np.mean(others) if others else 0.0))
    return (np.array(result)[:, None] * case["mask"],) * 2


def compute_reinforce(case: Case) -> tuple[np.ndarray, np.ndarray]:
    returns = np.zeros(case["mask"].shape)
    for i, row in enumerate(case["mask"]):
        running = 0.0
        for t in np.flatnonzero(row)[::-1]:
            running = returns[i, t] = case["token_rewards"][i, t] + case["gamma"] * running
    return whiten(returns, case["mask"]), returns


ORACLES: dict[AdvantageEstimator, Callable[[Case], tuple[np.ndarray, np.ndarray]]] = {
    AdvantageEstimator.GRPO: compute_grpo,
    AdvantageEstimator.GRPO_MULTITURN: compute_multiturn,
    AdvantageEstimator.GAE: compute_gae,
    AdvantageEstimator.RLOO: compute_rloo,
    AdvantageEstimator.REINFORCE_PLUS_PLUS: compute_reinforce,
}
every_estimator = pytest.mark.parametrize("name", list(AdvantageEstimator))


def give_to_estimators(case: Case) -> Rewards:
    return Rewards(
        token_rewards=torch.tensor(case["token_rewards"]).float(),
        mask=torch.tensor(case["mask"]).float(),
        uids=case["uids"],
        turn_ids=torch.tensor(case["turn_ids"]),
        turn_rewards=case["turns"],
        whole_rewards=torch.tensor(case["whole"]),
        values=torch.tensor(case["values"]).float(),
    )


def build_options(name: AdvantageEstimator, case: Case) -> AlgorithmSettings:
    return AlgorithmSettings(
        adv_estimator=name, gamma=case["gamma"], lam=case["lam"], norm_adv_by_std_in_grpo=case["by_std"]
    )


def test_every_estimator_of_the_settings_is_registered() -> None:
    assert set(ESTIMATORS) == set(ORACLES) == set(AdvantageEstimator)


@every_estimator
@given(case=draw_cases())
def test_an_estimator_equals_its_formula(name: AdvantageEstimator, case: Case) -> None:
    result = estimate_advantages(give_to_estimators(case), build_options(name, case))
    advantages, returns = ORACLES[name](case)
    np.testing.assert_allclose(result.advantages.numpy(), advantages, atol=2e-4)
    np.testing.assert_allclose(result.returns.numpy(), returns, atol=2e-4)


@every_estimator
@given(case=draw_cases(), poison=st.sampled_from([math.nan, math.inf, 1e6, -3.0]))
def test_values_on_observation_tokens_do_not_matter(name: AdvantageEstimator, case: Case, poison: float) -> None:
    clean = give_to_estimators(case)
    outside = clean.mask == 0
    poisoned = replace(
        clean,
        token_rewards=clean.token_rewards.masked_fill(outside, poison),
        values=clean.values.masked_fill(outside, poison),
    )
    expected, result = (estimate_advantages(rewards, build_options(name, case)) for rewards in (clean, poisoned))
    assert torch.equal(result.advantages, expected.advantages)
    assert torch.equal(result.returns, expected.returns)
    assert not result.advantages[outside].any()
    assert not result.returns[outside].any()


@every_estimator
@given(case=draw_cases(), data=st.data())
def test_permuting_rows_permutes_the_result(name: AdvantageEstimator, case: Case, data: st.DataObject) -> None:
    rewards = give_to_estimators(case)
    order = data.draw(st.permutations(range(len(case["uids"]))))
    assert rewards.values is not None
    shuffled = Rewards(
        rewards.token_rewards[order],
        rewards.mask[order],
        [rewards.uids[i] for i in order],
        rewards.turn_ids[order],
        [rewards.turn_rewards[i] for i in order],
        rewards.whole_rewards[order],
        rewards.values[order],
    )
    expected, result = (estimate_advantages(given, build_options(name, case)) for given in (rewards, shuffled))
    torch.testing.assert_close(result.advantages, expected.advantages[order], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(result.returns, expected.returns[order], atol=2e-5, rtol=1e-5)


@every_estimator
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(name: AdvantageEstimator, value: float) -> None:
    mask = torch.ones(2, 3)
    rewards = build_rewards(torch.tensor([[0.0, 0.0, value], [0.0, 0.0, 1.0]]), mask, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="a reward is NaN or infinite"):
        estimate_advantages(rewards, AlgorithmSettings(adv_estimator=name))
    turned = replace(build_rewards(torch.zeros(2, 3), mask, torch.zeros(2, 3)), turn_rewards=[{1: value}, {1: 0.0}])
    with pytest.raises(ValueError, match="a reward is NaN or infinite"):
        estimate_advantages(turned, AlgorithmSettings(adv_estimator=name))


def test_gae_without_values_is_refused() -> None:
    rewards = replace(build_rewards(torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2, 3)), values=None)
    with pytest.raises(ValueError, match="needs the values of a critic"):
        estimate_advantages(rewards, AlgorithmSettings(adv_estimator="gae"))


# verl.


@pytest.mark.parametrize("by_std", [True, False])
def test_grpo_equals_that_of_verl(by_std: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    rewards = torch.randint(0, 5, (24, 9), generator=draw).float() / 4
    mask = (torch.rand(24, 9, generator=draw) > 0.3).float()
    uids = [str(i % 5) for i in range(24)]
    theirs, _ = get_adv_estimator_fn("grpo")(rewards, mask, np.array(uids), norm_adv_by_std_in_grpo=by_std)
    torch.testing.assert_close(grpo_outcome(rewards, mask, uids, by_std), theirs, atol=1e-5, rtol=1e-4)


@settings(max_examples=20, deadline=None)
@given(case=draw_cases())
def test_multi_turn_grpo_is_in_verls_registry(case: Case) -> None:
    rewards = give_to_estimators(case)
    theirs, returns = get_adv_estimator_fn("grpo_multiturn")(
        token_level_rewards=rewards.token_rewards,
        response_mask=rewards.mask,
        config=SimpleNamespace(gamma=1.0),
        index=np.array(case["uids"]),
        turn_ids=rewards.turn_ids,
        turn_rewards=rewards.turn_rewards,
        whole_rewards=rewards.whole_rewards,
    )
    ours = estimate_advantages(rewards, AlgorithmSettings(adv_estimator="grpo_multiturn"))
    assert torch.equal(theirs, ours.advantages)
    assert torch.equal(returns, ours.returns)


# Properties of the specification beside the formulas.


@given(case=draw_cases())
def test_without_discount_gae_over_state_tokens_is_gae_over_all_columns(case: Case) -> None:
    rewards = give_to_estimators(case)
    assert rewards.values is not None
    result, _ = gae(rewards.token_rewards, rewards.values, rewards.mask, 1.0, 1.0)
    to_the_end = case["token_rewards"][:, ::-1].cumsum(1)[:, ::-1] - case["values"]
    np.testing.assert_allclose(result.numpy(), whiten(to_the_end, case["mask"]), atol=2e-4)


@pytest.mark.parametrize("name", [n for n in AdvantageEstimator if n not in ("gae", "reinforce_plus_plus")])
@pytest.mark.parametrize("reward", [0.1, 0.2, 0.3, 0.7])
def test_a_group_whose_rewards_are_all_equal_has_advantage_zero(name: AdvantageEstimator, reward: float) -> None:
    whole_rewards = torch.full((8,), reward, dtype=torch.double)
    tokens, mask = torch.full((8, 1), reward), torch.ones(8, 1)
    rewards = Rewards(tokens, mask, ["a"] * 8, mask.long(), [{1: reward}] * 8, whole_rewards)
    result = estimate_advantages(rewards, AlgorithmSettings(adv_estimator=name))
    assert result.advantages.abs().max() == pytest.approx(0.0, abs=1e-7 if name == "rloo" else 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 1.0, 13.1])
def test_equal_scores_spread_over_different_lengths_have_advantage_zero(dtype: torch.dtype, reward: float) -> None:
    lengths = [3, 7, 11, 130, 997, 4001]
    turns = [Component(name=f"turn_{turn}", weighted=reward / 6) for turn in (1, 2, 3)]
    score = Score(total=reward, components=[*turns, Component(name="whole", weighted=reward / 2)])
    mask, tokens = torch.zeros(len(lengths), max(lengths)), torch.zeros(len(lengths), max(lengths), dtype=dtype)
    for row, length in enumerate(lengths):
        ids = [1 + 3 * place // length for place in range(length)]
        placed = compute_token_rewards(arrive_scored([1] * length, ids, score), RewardPlacement.TURN_PROPORTIONAL)
        mask[row, :length], tokens[row, :length] = 1, torch.tensor(placed.rewards, dtype=dtype)
    assert torch.equal(grpo_outcome(tokens, mask, ["a"] * len(lengths)), torch.zeros_like(mask))
    tokens[0, 0] += 0.01
    assert grpo_outcome(tokens, mask, ["a"] * len(lengths)).abs().max() > 1  # scores that do differ are told apart


def test_turn_rewards_that_differ_by_rounding_are_equal() -> None:
    turns, mask = [{1: 0.1 + 0.2}, {1: 0.3}], torch.ones(2, 1)
    result = grpo_multiturn(turns, torch.tensor([0.3, 0.1 + 0.2], dtype=torch.double), mask.long(), mask, ["a", "a"])
    assert torch.equal(result, torch.zeros_like(mask))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused_inside_the_mask_alone(value: float) -> None:
    mask, values = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]), torch.zeros(2, 3)
    values[0, 2] = value
    rewards = replace(build_rewards(torch.ones(2, 3), mask, values), ids=["run/a/0", "run/a/1"])
    algorithm = AlgorithmSettings(adv_estimator="gae")
    assert estimate_advantages(rewards, algorithm).advantages.isfinite().all()
    values[1, 1] = value
    with pytest.raises(
        NonFiniteValueError, match=rf"value of trajectory run/a/1 is {value} at token 1 of its response"
    ):
        estimate_advantages(rewards, algorithm)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), min_size=1, max_size=16), st.sampled_from([1, 2]))
def test_a_row_takes_part_if_its_group_has_enough_valid_rows(rows: list[tuple[str, bool]], least: int) -> None:
    uids = [uid for uid, _ in rows]
    result = find_participants(uids, torch.tensor([valid for _, valid in rows]), least)
    valid = {uid: sum(v for u, v in rows if u == uid) for uid in uids}
    assert result.used.tolist() == [v and valid[u] >= least for u, v in rows]
    assert result.dead_groups == sum(count < least for count in valid.values())
