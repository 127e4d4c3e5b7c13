"""Trajectories of a step: every one of the batch, each with what the step made of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from arrived_groups import arrive
from trainer_parts import build_trajectory, make_group

from forage_proto.v1.trajectory_pb2 import Status, TrajectoryGroup
from forage_queue.streams.client import Entry
from forage_queue.trainer.batcher import Batch
from forage_records.step_file import Fate, GroupFate, list_saved_steps, read_group_fates, read_step, step_file_path
from forage_records.trajectory_file import read_header, read_trajectories
from forage_runtime.settings import AlgorithmSettings, Settings, load_settings
from forage_trainer.data.overlong import mask_cut
from forage_trainer.data.tensors import build_step_tensors, leave_out_unusable, select_trajectories
from forage_trainer.reporting.trajectories import StepFiles, StepRecord
from forage_trajectory.codec import restore_group

REPOSITORY = Path(__file__).parents[3]


def build_settings(tmp_path: Path, every: int, *more: str) -> Settings:
    model = f"model.path={REPOSITORY}/models/tiny-policy"
    return load_settings(
        None, [f"run.dir={tmp_path}", "run.id=r", f"trainer.rollout_data_freq={every}", model, *more], {}
    )


@pytest.fixture
def record() -> StepRecord:
    """Two groups: one of lengths 18 and 25 and a row that failed; one that is dead."""
    one, dead = make_group("a", [1.0, 0.0]), make_group("b", [1.0])
    one.trajectories.append(build_trajectory("a", 2, 0.0, status=Status.STATUS_TIMEOUT))
    one.trajectories[1].CopyFrom(build_trajectory("a", 1, 0.0, turns=(6, 5, 0)))
    chosen = select_trajectories(make_batch(one, dead).groups, AlgorithmSettings())
    tensors = build_step_tensors(chosen, 4, 1, 0, AlgorithmSettings())
    assert tensors is not None
    count = torch.arange(tensors.mask.numel()).reshape(tensors.mask.shape).float()
    return StepRecord(
        make_batch(one, dead),
        chosen,
        4,
        tensors,
        advantages=count,
        returns=count + 0.5,
        token_rewards=tensors.token_rewards,
        log_probs=-count,
        entropies=count / 2,
    )


def make_batch(*groups: TrajectoryGroup, **more: Any) -> Batch:
    for position, group in enumerate(groups):
        group.position = position
    return Batch(20, tuple(Entry(b"1-0", arrive(group)) for group in groups), stale=0, **more)


def test_rows_hold_the_steps_values_over_their_own_tokens(tmp_path: Path, record: StepRecord) -> None:
    files = StepFiles(build_settings(tmp_path, 10))
    file = files.write(20, (), record)
    assert file == step_file_path(tmp_path / "r", 20)
    rows = list(read_step(file))
    every = [t for g in record.groups for t in restore_group(g)]
    assert [row.trajectory for row in rows] == every == list(read_trajectories(file))
    assert read_header(file).end_of_turn == "<|im_end|>"
    assert [row.trained for row in rows] == [True, True, False, False]
    width = record.tensors.mask.shape[1] if record.tensors else 0
    for number, row in enumerate(rows[:2]):
        own, length = row.trajectory, len(row.trajectory.loss_mask)
        assert (row.step, row.version) == (20, 4)
        assert row.loss_mask == list(own.loss_mask)
        assert row.advantages == [float(number * width + token) for token in range(length)]
        assert row.log_probs == [-value for value in row.advantages]
        assert row.entropies == [value / 2 for value in row.advantages]
        assert row.reason is None
        assert row.engine_log_probs == pytest.approx(list(own.logprobs))
        assert row.returns_sum == pytest.approx(
            sum(value + 0.5 for value, mask in zip(row.advantages, own.loss_mask, strict=True) if mask)
        )
        assert row.token_rewards is not None
        assert sum(row.token_rewards) == pytest.approx(own.score.total)
        assert (row.reference_log_probs, row.values) == (None, None)
    assert rows[2].advantages is None
    assert rows[3].loss_mask is None
    assert rows[2].reason == "failed: TIMEOUT"
    lonely = "1 of 1 trajectories are valid, 2 needed"
    assert rows[3].reason == f"group dead: {lonely}"
    assert read_group_fates(file) == [GroupFate("a", 0, 0, Fate.TRAINED), GroupFate("b", 1, 0, Fate.DEAD, lonely)]


def test_the_file_says_what_became_of_every_group_and_trajectory(tmp_path: Path) -> None:
    good, equal, broken = make_group("good", [1.0, 0.0]), make_group("equal", [0.5, 0.5]), make_group("broken", [1.0])
    for number, detail in enumerate(("no answer", "no answer", "engine lost")):
        broken.trajectories.append(build_trajectory("broken", number + 1, 0.0, status=Status.STATUS_TIMEOUT))
        broken.trajectories[-1].status_detail = detail
    good.trajectories.append(build_trajectory("good", 2, 1.0, turns=(60, 5)))
    good.trajectories.append(build_trajectory("good", 3, 0.0, score_status=Status.STATUS_INTERNAL))
    good.trajectories.append(build_trajectory("good", 4, 1.0))
    del good.trajectories[4].logprobs[0]
    settings = build_settings(tmp_path, 10, "trainer.actor.ppo_max_token_len_per_gpu=60")
    batch = make_batch(
        good,
        equal,
        broken,
        stragglers=((20, 3), (20, 4)),
        dropped=(GroupFate("equal", 1, 0, Fate.DROPPED, "stale: sampled"),),
    )
    batch = batch.with_groups(leave_out_unusable(batch.groups, settings.trainer)[0])
    algorithm = AlgorithmSettings(filter_groups=True)
    chosen = select_trajectories(batch.groups, algorithm)
    file = StepFiles(settings).write(
        10, ("late", "later"), StepRecord(batch, chosen, 4, build_step_tensors(chosen, 4, 1, 0, algorithm))
    )
    fates = read_group_fates(file)
    assert fates is not None
    assert [(fate.uid, fate.position, fate.fate, fate.reason) for fate in fates] == [
        ("good", 0, "trained", ""),
        ("equal", 1, "dropped", "stale: sampled"),
        ("equal", 1, "filtered", "all rewards are equal"),
        (
            "broken",
            2,
            "dead",
            "1 of 4 trajectories are valid, 2 needed (2 × failed: no answer; 1 × failed: engine lost)",
        ),
        ("late", 3, "dropped", "straggler: it did not arrive in time"),
        ("later", 4, "dropped", "straggler: it did not arrive in time"),
    ]
    reasons = [row.reason for row in read_step(file)]
    assert reasons[:2] == [None, None]
    assert reasons[2].startswith("too long: it has")
    assert reasons[3] == "no reward: INTERNAL"
    assert reasons[4] == "invalid: a reward that is not finite, or values that are missing for some tokens"
    assert reasons[5:7] == ["group filtered: all rewards are equal"] * 2
    assert reasons[7].startswith("group dead: 1 of 4")
    assert reasons[8:] == ["failed: no answer", "failed: no answer", "failed: engine lost"]
    skipped = replace(StepRecord(batch, chosen, 4), unused="the loss is NaN")
    fates = read_group_fates(StepFiles(settings).write(10, (), skipped))
    assert fates is not None
    assert (fates[0].fate, fates[0].reason) == ("unused", "the step took no update: the loss is NaN")
    assert next(read_step(file)).reason == "group unused: the step took no update: the loss is NaN"


def test_what_a_limit_cut_off_is_trained_in_the_baseline_alone(tmp_path: Path, record: StepRecord) -> None:
    assert record.tensors is not None
    cut, _ = mask_cut(record.tensors, [record.rows[0], replace(record.rows[1], finished=False)])
    file = StepFiles(build_settings(tmp_path, 1)).write(1, (), replace(record, tensors=cut))
    rows = list(read_step(file))
    assert [row.trained for row in rows[:2]] == [True, True]
    assert sum(rows[1].loss_mask or [1]) == 0
    assert rows[1].reason == "cut off by a limit: in the baseline of its group, not in the losses"


def test_other_tools_see_components_and_scores(tmp_path: Path, record: StepRecord) -> None:
    rows = pq.read_table(StepFiles(build_settings(tmp_path, 1)).write(1, (), record)).to_pylist()
    assert rows[0]["components"] == [{"name": "format", "raw": 1.0, "weighted": 0.0}]
    assert [row["score"] for row in rows] == [1.0, 0.0, 0.0, 1.0]
    assert [row["status"] for row in rows] == ["OK", "OK", "TIMEOUT", "OK"]


def test_every_nth_step_is_kept_and_a_step_taken_again_replaces_its_file(tmp_path: Path, record: StepRecord) -> None:
    files = StepFiles(build_settings(tmp_path, 10))
    assert [step for step in range(1, 31) if files.is_kept(step)] == [10, 20, 30]
    assert not any(StepFiles(build_settings(tmp_path, 0)).is_kept(step) for step in range(100))
    files.write(10, (), record)
    files.write(10, (), StepRecord(Batch(20, record.batch.entries[:1], stale=0), record.selected, 4))
    assert [row.trained for row in read_step(step_file_path(tmp_path / "r", 10))] == [False] * 3
    assert list_saved_steps(tmp_path / "r") == [10]
