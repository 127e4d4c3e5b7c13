"""Groups become tensors: which rows take part, where the reward is placed, which tokens are current."""

from __future__ import annotations

import math

import pytest
import torch
from arrived_groups import arrive
from hypothesis import given
from hypothesis import strategies as st
from trainer_parts import PROMPT_TOKENS, build_trajectory, make_group

from forage_proto.v1.trajectory_pb2 import PolicySegment, Status, Trajectory, TrajectoryGroup
from forage_runtime.errors import SettingsError
from forage_runtime.settings import AdvantageEstimator, AlgorithmSettings, load_settings
from forage_trainer.data.tensors import StepTensors, build_step_tensors, find_equal_groups, select_trajectories
from forage_trainer.engine.cpu_engine import cut_micro_batches

FAILURES = [Status.STATUS_TIMEOUT, Status.STATUS_INTERNAL, Status.STATUS_ABSTAIN, Status.STATUS_UNSPECIFIED]


PLAIN = AlgorithmSettings()


def build_tensors(*groups: TrajectoryGroup, version: int = 0, algorithm: AlgorithmSettings = PLAIN) -> StepTensors:
    chosen = select_trajectories(list(map(arrive, groups)), algorithm)
    result = build_step_tensors(chosen, version, 1, 0, algorithm)
    assert result is not None
    return result


@pytest.mark.parametrize("status", FAILURES)
@pytest.mark.parametrize("where", ["status", "score_status"])
def test_a_failed_row_is_in_neither_baseline_nor_loss(status: Status.ValueType, where: str) -> None:
    valid = make_group("a", [0.0, 1.0, 1.0])
    mixed = make_group("a", [0.0, 1.0, 1.0])
    mixed.trajectories.insert(1, build_trajectory("a", 9, 5.0, **{where: status}))
    with_failure, without = build_tensors(mixed), build_tensors(valid)
    assert with_failure.uids == without.uids
    torch.testing.assert_close(with_failure.token_rewards, without.token_rewards)
    assert with_failure.data["input_ids"].values().tolist() == without.data["input_ids"].values().tolist()


def test_a_row_without_state_tokens_does_not_take_part() -> None:
    result = make_group("a", [0.0, 1.0])
    result.trajectories.append(build_trajectory("a", 5, 1.0, turns=()))
    assert len(build_tensors(result).uids) == 2


def test_a_group_with_one_valid_row_contributes_nothing_and_is_counted() -> None:
    lonely = make_group("b", [1.0])
    lonely.trajectories.append(build_trajectory("b", 1, 1.0, status=Status.STATUS_TIMEOUT))
    groups = [make_group("a", [0.0, 1.0]), lonely, TrajectoryGroup(group_uid="c")]
    result = select_trajectories(list(map(arrive, groups)), PLAIN)
    assert {t.group_uid for t in result.trajectories} == {"a"}
    assert result.dead_groups == 2
    assert build_tensors(*groups).positions == (0, 0)


def test_a_batch_of_failures_has_no_tensors() -> None:
    failed = TrajectoryGroup(
        group_uid="a", trajectories=[build_trajectory("a", i, 0.0, status=Status.STATUS_INTERNAL) for i in range(4)]
    )
    result = select_trajectories([arrive(failed)], PLAIN)
    assert result.dead_groups == 1
    assert build_step_tensors(result, 0, 1, 0, PLAIN) is None


def test_a_reward_that_is_not_finite_is_a_failure() -> None:
    mixed = make_group("a", [0.0, 1.0, math.nan])
    mixed.trajectories.append(build_trajectory("a", 3, 0.5))
    mixed.trajectories[3].score.components.add(name="turn_1", raw=math.inf, weighted=math.inf)
    assert len(build_tensors(mixed).uids) == 2


@pytest.mark.parametrize("field", ["turn_ids", "logprobs", "loss_mask"])
def test_a_row_whose_fields_differ_in_length_does_not_take_part(field: str) -> None:
    mixed = make_group("a", [0.0, 1.0, 1.0])
    getattr(mixed.trajectories[1], field).pop()
    assert len(build_tensors(mixed).uids) == 2


# Groups whose rewards are all equal.


FILTERING = AlgorithmSettings(filter_groups=True)


def test_a_group_of_equal_rewards_is_filtered_if_set_and_its_position_reported() -> None:
    flat = make_group("b", [0.3, 0.3, 0.3])
    flat.trajectories.append(build_trajectory("b", 3, 1.0, status=Status.STATUS_TIMEOUT))
    groups = [flat, make_group("a", [0.0, 1.0]), make_group("c", [0.7, 0.7]), make_group("d", [1.0])]
    for position, group in enumerate(groups):
        group.position = position
    arrived = list(map(arrive, groups))
    result = select_trajectories(arrived, FILTERING)
    assert result.filtered == (0, 2)
    assert result.dead_groups == 1
    assert set(result.positions) == {1}
    assert select_trajectories(arrived, PLAIN).filtered == ()
    assert {t.group_uid for t in select_trajectories(arrived, PLAIN).trajectories} == {"a", "b", "c"}


def test_groups_with_unequal_turn_rewards_are_kept_for_multi_turn_grpo() -> None:
    turned = make_group("a", [0.2, 0.2])
    for row, parts in zip(turned.trajectories, ((0.2, 0.0), (0.0, 0.2)), strict=True):
        for turn, part in enumerate(parts, 1):
            row.score.components.add(name=f"turn_{turn}", raw=2 * part, weighted=part)
    assert find_equal_groups([arrive(turned)], AdvantageEstimator.GRPO) == (0,)
    assert find_equal_groups([arrive(turned)], AdvantageEstimator.GRPO_MULTITURN) == ()
    assert find_equal_groups([arrive(make_group("a", [0.2, 0.2]))], AdvantageEstimator.GRPO_MULTITURN) == (0,)


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_filtering_is_refused_for_estimators_that_learn_from_equal_rewards(estimator: str) -> None:
    with pytest.raises(SettingsError, match="compares within a group"):
        load_settings(
            None, [f"trainer.algorithm.adv_estimator={estimator}", "trainer.algorithm.filter_groups=true"], {}
        )


# What is trained on.


def test_without_state_masking_observations_are_trained_on_without_reward() -> None:
    rows = [build_trajectory("a", i, float(i), turns=(3, 2), observation=4) for i in range(2)]
    both = TrajectoryGroup(group_uid="a", trajectories=rows)
    result, masked = build_tensors(both, algorithm=AlgorithmSettings(state_masking=False)), build_tensors(both)
    assert result.mask.eq(1).all()
    assert result.data["loss_mask"].values().eq(1).all()
    assert result.data["response_mask"].values().eq(1).all()
    assert torch.equal(result.state, masked.mask)
    assert result.data["state_mask"].values().tolist() == masked.data["loss_mask"].values().tolist()
    assert torch.equal(result.token_rewards, masked.token_rewards)
    assert torch.equal(result.current, masked.current)


def test_engine_log_probs_on_observations_are_ignored() -> None:
    rows = [build_trajectory("a", i, float(i), turns=(2, 2), observation=2) for i in range(2)]
    for row in rows:
        row.logprobs[2:4] = [math.nan, -3.0]
    result = build_tensors(TrajectoryGroup(group_uid="a", trajectories=rows))
    assert result.engine_log_probs[:, 2:4].eq(0).all()
    assert result.data["rollout_log_probs"].values().isfinite().all()


def test_the_reward_is_on_the_last_state_token_even_if_an_observation_follows() -> None:
    answered = build_trajectory("a", 0, 0.75, turns=(3, 2), observation=4)  # 111 0000 11
    cut = build_trajectory("a", 1, 0.5, turns=(3, 0), observation=4)  # 111 0000
    result = build_tensors(TrajectoryGroup(group_uid="a", trajectories=[answered, cut]))
    assert result.token_rewards.nonzero().tolist() == [[0, 8], [1, 2]]
    assert result.token_rewards.sum(1).tolist() == [0.75, 0.5]


def test_only_tokens_of_this_version_and_epoch_are_current() -> None:
    mixed = build_trajectory("a", 0, 1.0, turns=(4, 4), observation=2)
    del mixed.segments[:]
    mixed.segments.extend(
        [
            PolicySegment(version=3, epoch=1, begin=0, end=2),
            PolicySegment(version=4, epoch=1, begin=2, end=8),
            PolicySegment(version=4, epoch=2, begin=8, end=10),
        ]
    )
    other = build_trajectory("a", 1, 0.0, version=3, turns=(4, 4), observation=2)
    result = build_tensors(TrajectoryGroup(group_uid="a", trajectories=[mixed, other]), version=4)
    assert result.current[0].nonzero().flatten().tolist() == [2, 3, 6, 7]
    assert not result.current[1].any()


def test_jagged_and_padded_layouts_hold_the_same_values() -> None:
    rows: list[Trajectory] = [build_trajectory("a", i, 1.0, turns=(3 + i, 2 * i + 1)) for i in range(4)]
    result = build_tensors(TrajectoryGroup(group_uid="a", trajectories=rows))
    for i, row in enumerate(rows):
        assert result.data["input_ids"][i].tolist() == list(row.token_ids)
        assert result.data["responses"][i].tolist() == list(row.token_ids[PROMPT_TOKENS:])
        assert result.mask[i, : len(row.loss_mask)].tolist() == list(row.loss_mask)
        assert not result.mask[i, len(row.loss_mask) :].any()
    again = result.build(range(4), {"again": result.mask})
    assert again["again"].values().tolist() == again["response_mask"].values().tolist()


@given(st.lists(st.integers(1, 60), min_size=1, max_size=50), st.integers(1, 200))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    cuts = cut_micro_batches(lengths, budget)
    assert sorted(row for cut in cuts for row in cut) == list(range(len(lengths)))
    for cut in cuts:
        assert len(cut) == 1 or len(cut) * max(lengths[row] for row in cut) <= budget
