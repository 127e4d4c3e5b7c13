"""Placement of a score on the tokens of its trajectory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from arrived_groups import arrive, arrive_scored
from hypothesis import given
from hypothesis import strategies as st
from trainer_parts import PROMPT_TOKENS, make_group

from forage_proto.v1.trajectory_pb2 import Component, Score, Status
from forage_runtime.settings import AlgorithmSettings, RewardPlacement
from forage_trainer.algorithms.token_rewards import (
    StructuredReward,
    compute_token_rewards,
    place_reward,
    to_structured_reward,
)
from forage_trainer.data.tensors import build_step_tensors, select_trajectories
from forage_trajectory.trajectory import Trajectory

DATA = Path(__file__).parents[2] / "data"
SPREAD, LAST = RewardPlacement.TURN_PROPORTIONAL, RewardPlacement.FINAL_TOKEN_ONLY


def load_examples(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / path).read_text().splitlines()]


def build_turned(turns: dict[int, float], whole: dict[str, float], mask: list[int], turn_ids: list[int]) -> Trajectory:
    """A trajectory whose score has the components that the reward `structured` gives."""
    parts = [Component(name=f"turn_{turn}", raw=one, weighted=one / len(turns)) for turn, one in turns.items()]
    parts += [Component(name=name, raw=one, weighted=0.0 if name[0] == "_" else one) for name, one in whole.items()]
    score = Score(total=sum(p.weighted for p in parts), components=parts, status=Status.STATUS_OK)
    return arrive_scored(mask, turn_ids, score)


@pytest.mark.parametrize("example", load_examples("trainer/reward_placement.jsonl"))
@pytest.mark.parametrize("placement", [SPREAD, LAST])
def test_an_outcome_reward_is_on_the_last_state_token(example: dict[str, Any], placement: RewardPlacement) -> None:
    turn_ids = [1 if own else -1 for own in example["state"]]
    score = Score(total=example["reward"], components=[Component(name="em", weighted=example["reward"])])
    result = compute_token_rewards(arrive_scored(example["state"], turn_ids, score), placement)
    assert [[place, value] for place, value in enumerate(result.rewards) if value] == example["nonzero"]


@pytest.mark.parametrize("example", load_examples("trainer/structured_to_tokens.jsonl"))
def test_tokens_get_the_expected_rewards(example: dict[str, Any]) -> None:
    turns, placement = dict(example["turns"]), RewardPlacement(example["strategy"])
    whole = sum(value for name, value in example["whole"].items() if not name.startswith("_"))
    result = place_reward(StructuredReward(turns, whole), example["mask"], example["turn_ids"], placement)
    assert result.rewards == pytest.approx(example["want"])
    assert result.flagged == (not any(example["mask"]))
    if turns and min(turns) >= 1:  # components name turns from 1 only
        row = build_turned(turns, example["whole"], example["mask"], example["turn_ids"])
        assert compute_token_rewards(row, placement).rewards == pytest.approx(example["want"])


def test_a_mask_and_turn_ids_of_different_lengths_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 mask values but 1 turn ids"):
        place_reward(StructuredReward({}, 1.0), [1, 1], [1], LAST)


values = st.floats(-10, 10)
tokens = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([-1, 1, 2, 3, 4])), max_size=40)


@given(st.dictionaries(st.integers(1, 5), values, max_size=5), values, tokens, st.sampled_from([SPREAD, LAST]))
def test_the_placement_conserves_its_sum(
    turns: dict[int, float], whole: float, response: list[tuple[int, int]], placement: RewardPlacement
) -> None:
    mask, turn_ids = [mask for mask, _ in response], [turn for _, turn in response]
    result = place_reward(StructuredReward(turns, whole), mask, turn_ids, placement)
    with_tokens = {turn for valid, turn in response if valid}
    if not any(mask):
        assert result.flagged
        assert result.rewards.tolist() == [0.0] * len(mask)
        return
    sums = {
        SPREAD: sum(value for turn, value in turns.items() if turn in with_tokens) + whole,
        LAST: (sum(turns.values()) / len(turns) if turns else 0.0) + whole,
    }
    assert sum(result.rewards) == pytest.approx(sums[placement], abs=1e-9)
    assert result.turn_sum == pytest.approx(sums[SPREAD], abs=1e-9)
    assert result.mean_sum == pytest.approx(sums[LAST], abs=1e-9)
    assert all(reward == 0.0 for reward, valid in zip(result.rewards, mask, strict=True) if not valid)


@given(
    st.dictionaries(st.integers(1, 4), st.floats(-1, 1), min_size=1, max_size=4),
    st.floats(-1, 1),
    st.lists(st.sampled_from([-1, 1, 2, 3, 4]), min_size=1, max_size=20).filter(lambda ids: max(ids) > 0),
)
def test_rewards_are_on_state_tokens_and_keep_their_sum(turns: dict[int, float], whole: float, ids: list[int]) -> None:
    mask = [int(turn > 0) for turn in ids]
    row = build_turned(turns, {"exact_match": whole, "_raw": 1.0}, mask, ids)
    spread, last = compute_token_rewards(row, SPREAD), compute_token_rewards(row, LAST)
    for result in (spread, last):
        assert not any(value for value, own in zip(result.rewards, mask, strict=True) if not own)
    assert sum(spread.rewards) == pytest.approx(sum(v for t, v in turns.items() if t in ids) + whole, abs=1e-6)
    assert sum(last.rewards) == pytest.approx(row.score.total, abs=1e-6)
    assert sum(spread.rewards) == pytest.approx(spread.turn_sum)
    assert sum(last.rewards) == pytest.approx(last.mean_sum)


def test_a_weighted_part_of_a_composition_keeps_its_turns() -> None:
    parts = [Component(name=f"kg.turn_{turn}", raw=0.5, weighted=0.3 * 0.5 / 2) for turn in (1, 2)]
    parts += [Component(name="kg.exact_match", raw=1.0, weighted=0.3), Component(name="em", raw=1.0, weighted=0.7)]
    reward = to_structured_reward(Score(total=1.15, components=parts))
    assert reward.turns == pytest.approx({1: 0.15, 2: 0.15})
    assert reward.whole == pytest.approx(1.0)


def test_a_component_for_logs_is_rewarded_nowhere_whatever_it_holds() -> None:
    weighted = {"turn_1": 0.5, "_log": 7.0, "_a.turn_1": 3.0, "exact_match": 0.25}
    parts = [Component(name=name, weighted=value) for name, value in weighted.items()]
    reward = to_structured_reward(Score(components=parts))
    assert (reward.turns, reward.whole) == ({1: 0.5}, 0.25)


@pytest.mark.parametrize(
    ("given_settings", "expected"),
    [
        ({}, LAST),
        ({"adv_estimator": "gae"}, LAST),
        ({"adv_estimator": "gae", "use_kl_in_reward": True}, LAST),
        ({"adv_estimator": "grpo", "use_kl_in_reward": True}, SPREAD),
        ({"adv_estimator": "gae", "reward_placement": "turn_proportional"}, SPREAD),
        ({"use_kl_in_reward": True, "reward_placement": "final_token_only"}, LAST),
    ],
)
def test_estimator_and_kl_decide_an_unset_placement(given_settings: dict[str, Any], expected: RewardPlacement) -> None:
    assert AlgorithmSettings(**given_settings).placement is expected


def test_tensors_hold_the_placed_rewards_and_the_parts_of_the_score() -> None:
    both = make_group("a", [0.0, 0.0])
    for row, gain in zip(both.trajectories, (0.2, 0.4), strict=True):
        row.turn_ids[:] = [1] * 6 + [-1] * 7 + [2] * 5
        row.score.CopyFrom(build_turned({1: gain, 2: 0.1}, {"exact_match": 0.3}, [], []).score)
    settings_ = AlgorithmSettings(reward_placement="turn_proportional")
    result = build_step_tensors(select_trajectories([arrive(both)], settings_), 0, 1, 0, settings_)
    assert result is not None
    for turns, gain in zip(result.turn_rewards, (0.2, 0.4), strict=True):
        assert turns == pytest.approx({1: gain, 2: 0.1})
    assert result.whole_rewards.tolist() == pytest.approx([0.3, 0.3])
    first = [0.2 / 6 + 0.3 / 11] * 6 + [0.0] * 7 + [0.1 / 5 + 0.3 / 11] * 5
    torch.testing.assert_close(result.token_rewards[0], torch.tensor(first, dtype=torch.double))
    assert result.turn_ids[0].tolist() == list(both.trajectories[0].turn_ids)
    assert len(first) == len(both.trajectories[0].token_ids) - PROMPT_TOKENS
