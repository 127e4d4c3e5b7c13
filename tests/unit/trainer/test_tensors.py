"""Groups become tensors: who takes part, where the reward goes, which tokens count as the trainer's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_parts import PROMPT_TOKENS, group, trajectory

from forage_common.v1.trajectory_pb2 import PolicySegment, Status, Trajectory, TrajectoryGroup
from forage_trainer.actor_loss import importance_weights
from forage_trainer.tensors import StepTensors, last_state_token, like_response, step_tensors
from forage_trainer.verl_cpu import micro_batches

FAILURES = [Status.STATUS_TIMEOUT, Status.STATUS_INTERNAL, Status.STATUS_ABSTAIN, Status.STATUS_UNSPECIFIED]


def tensors(*groups: TrajectoryGroup, version: int = 0) -> StepTensors:
    found, _ = step_tensors(groups, version, 1, 0)
    assert found is not None
    return found


@pytest.mark.parametrize("status", FAILURES)
@pytest.mark.parametrize("where", ["status", "score_status"])
def test_a_failed_row_is_in_neither_baseline_nor_loss(status: Status.ValueType, where: str) -> None:
    sound = group("a", [0.0, 1.0, 1.0])
    mixed = group("a", [0.0, 1.0, 1.0])
    mixed.trajectories.insert(1, trajectory("a", 9, 5.0, **{where: status}))
    with_failure, without = tensors(mixed), tensors(sound)
    assert with_failure.rows == 4
    assert with_failure.uids == without.uids
    torch.testing.assert_close(with_failure.token_rewards, without.token_rewards)
    assert with_failure.data["input_ids"].values().tolist() == without.data["input_ids"].values().tolist()


def test_a_row_without_state_tokens_does_not_take_part() -> None:
    found = group("a", [0.0, 1.0])
    found.trajectories.append(trajectory("a", 5, 1.0, turns=()))
    assert len(tensors(found).uids) == 2


def test_a_group_with_one_valid_row_contributes_nothing_and_is_counted() -> None:
    lonely = group("b", [1.0])
    lonely.trajectories.append(trajectory("b", 1, 1.0, status=Status.STATUS_TIMEOUT))
    found = tensors(group("a", [0.0, 1.0]), lonely, TrajectoryGroup(group_uid="c"))
    assert set(found.uids) == {"a"}
    assert found.dead_groups == 2
    assert found.positions == (0, 0)


def test_a_batch_of_failures_has_no_tensors() -> None:
    failed = TrajectoryGroup(
        group_uid="a", trajectories=[trajectory("a", i, 0.0, status=Status.STATUS_INTERNAL) for i in range(4)]
    )
    assert step_tensors([failed], 0, 1, 0) == (None, 1)


def test_the_reward_is_on_the_last_state_token_even_if_an_observation_follows() -> None:
    answered = trajectory("a", 0, 0.75, turns=(3, 2), observation=4)  # 111 0000 11
    cut = trajectory("a", 1, 0.5, turns=(3, 0), observation=4)  # 111 0000
    found = tensors(TrajectoryGroup(group_uid="a", trajectories=[answered, cut]))
    assert found.token_rewards.nonzero().tolist() == [[0, 8], [1, 2]]
    assert found.token_rewards.sum(1).tolist() == [0.75, 0.5]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=5, max_size=5).filter(any), min_size=1, max_size=8))
def test_the_last_state_token_is_the_last_one(masks: list[list[int]]) -> None:
    assert last_state_token(torch.tensor(masks)).tolist() == [max(i for i, m in enumerate(r) if m) for r in masks]


def test_only_tokens_of_this_version_and_epoch_are_the_trainers_own() -> None:
    mixed = trajectory("a", 0, 1.0, turns=(4, 4), observation=2)
    del mixed.segments[:]
    mixed.segments.extend(
        [
            PolicySegment(version=3, epoch=1, begin=0, end=2),
            PolicySegment(version=4, epoch=1, begin=2, end=8),
            PolicySegment(version=4, epoch=2, begin=8, end=10),
        ]
    )
    other = trajectory("a", 1, 0.0, version=3, turns=(4, 4), observation=2)
    found = tensors(TrajectoryGroup(group_uid="a", trajectories=[mixed, other]), version=4)
    assert found.current[0].nonzero().flatten().tolist() == [2, 3, 6, 7]
    assert not found.current[1].any()


def test_jagged_and_padded_layouts_hold_the_same() -> None:
    rows: list[Trajectory] = [trajectory("a", i, 1.0, turns=(3 + i, 2 * i + 1)) for i in range(4)]
    found = tensors(TrajectoryGroup(group_uid="a", trajectories=rows))
    for i, row in enumerate(rows):
        assert found.data["input_ids"][i].tolist() == list(row.token_ids)
        assert found.data["responses"][i].tolist() == list(row.token_ids[PROMPT_TOKENS:])
        assert found.mask[i, : len(row.loss_mask)].tolist() == list(row.loss_mask)
        assert not found.mask[i, len(row.loss_mask) :].any()
    again = like_response(found.mask, found.data)
    assert again.values().tolist() == found.data["response_mask"].values().tolist()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=50), st.integers(1, 200))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    cuts = micro_batches(lengths, budget)
    assert sorted(row for cut in cuts for row in cut) == list(range(len(lengths)))
    for cut in cuts:
        assert len(cut) == 1 or len(cut) * max(lengths[row] for row in cut) <= budget


def test_importance_weights_are_ratios_cut_off_above() -> None:
    trainer, engine = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([-1.0, -1.5, -9.0, -0.5])
    found = importance_weights(trainer, engine, 2.0)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.5, 8.0, -0.5]).exp().clamp(max=2.0))
