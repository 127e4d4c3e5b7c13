"""GRPO against an oracle in NumPy, verl's own, and the specification's examples."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forage_trainer.advantages import grpo_outcome, participation

EXAMPLES = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "data/trainer/grpo_outcome.jsonl").read_text().splitlines()
]
rewards = st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.8, 1.0, -0.5])


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """(token rewards, mask, uids); every row has a state token."""
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    flat = st.lists(rewards, min_size=rows * columns, max_size=rows * columns)
    bits = st.lists(st.integers(0, 1), min_size=rows * columns, max_size=rows * columns)
    mask = np.array(draw(bits)).reshape(rows, columns)
    mask[:, draw(st.integers(0, columns - 1))] = 1
    uids = draw(st.lists(st.sampled_from("abc"), min_size=rows, max_size=rows))
    return np.array(draw(flat)).reshape(rows, columns), mask, uids


def oracle(token_rewards: np.ndarray, mask: np.ndarray, uids: list[str], by_std: bool) -> np.ndarray:
    scores = token_rewards.astype(np.float64).sum(1)
    result = np.zeros_like(scores)
    for uid in set(uids):
        rows = [i for i, u in enumerate(uids) if u == uid]
        mean, std = (scores[rows].mean(), scores[rows].std(ddof=1)) if len(rows) > 1 else (0.0, 1.0)
        for i in rows:
            result[i] = (scores[i] - mean) / (std + 1e-6) if by_std else scores[i] - mean
    return result[:, None] * mask


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e["id"])
def test_examples_of_the_specification(example: dict) -> None:
    found = grpo_outcome(torch.tensor(example["token_rewards"]), torch.tensor(example["mask"]), example["uids"])
    torch.testing.assert_close(found, torch.tensor(example["advantages"]), atol=1e-5, rtol=0)


@settings(max_examples=200, deadline=None)
@given(batches(), st.booleans())
def test_advantages_equal_the_formula(batch: tuple[np.ndarray, np.ndarray, list[str]], by_std: bool) -> None:
    token_rewards, mask, uids = batch
    found = grpo_outcome(torch.tensor(token_rewards), torch.tensor(mask), uids, by_std)
    np.testing.assert_allclose(found.numpy(), oracle(token_rewards, mask, uids, by_std), atol=1e-4)


def test_advantages_equal_those_of_verl() -> None:
    importlib.import_module("forage_trainer.policy_worker")  # registers the CPU platform before verl looks for one
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    draw = torch.Generator().manual_seed(3)
    token_rewards = torch.randint(0, 5, (24, 9), generator=draw).float() / 4
    mask = (torch.rand(24, 9, generator=draw) > 0.3).float()
    uids = [str(i % 5) for i in range(24)]
    for by_std in (True, False):
        theirs, _ = get_adv_estimator_fn("grpo")(token_rewards, mask, np.array(uids), norm_adv_by_std_in_grpo=by_std)
        torch.testing.assert_close(grpo_outcome(token_rewards, mask, uids, by_std), theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("reward", [0.1, 0.2, 0.3, 0.7])
def test_a_group_whose_rewards_are_all_equal_has_advantage_zero(reward: float) -> None:
    found = grpo_outcome(torch.full((8, 1), reward), torch.ones(8, 1), ["a"] * 8)
    assert found.abs().max() == 0


@settings(max_examples=100, deadline=None)
@given(batches())
def test_tokens_outside_the_mask_get_nothing(batch: tuple[np.ndarray, np.ndarray, list[str]]) -> None:
    token_rewards, mask, uids = batch
    found = grpo_outcome(torch.tensor(token_rewards), torch.tensor(mask), uids)
    assert found[torch.tensor(mask) == 0].eq(0).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), min_size=1, max_size=16))
def test_a_row_takes_part_if_it_is_valid_and_has_a_valid_companion(rows: list[tuple[str, bool]]) -> None:
    uids = [uid for uid, _ in rows]
    found = participation(uids, torch.tensor([valid for _, valid in rows]))
    valid = {uid: sum(v for u, v in rows if u == uid) for uid in uids}
    assert found.used.tolist() == [v and valid[u] >= 2 for u, v in rows]
    assert found.dead_groups == sum(count < 2 for count in valid.values())
