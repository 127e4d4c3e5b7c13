"""Trajectories of a step: every one of the batch, each with what the step made of it."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from trainer_parts import build_trajectory, make_group

from forage_common.settings import AlgorithmSettings, Settings, load_settings
from forage_common.v1.trajectory_pb2 import Status
from forage_records.step_file import list_saved_steps, read_step, step_file_path
from forage_records.trajectory_file import read_header, read_trajectories
from forage_trainer.data.selection import select_trajectories
from forage_trainer.data.tensors import build_step_tensors
from forage_trainer.reporting.trajectories import StepFiles, StepRecord

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
    chosen = select_trajectories([one, dead], AlgorithmSettings())
    tensors = build_step_tensors(chosen, 4, 1, 0, AlgorithmSettings())
    assert tensors is not None
    count = torch.arange(tensors.mask.numel()).reshape(tensors.mask.shape).float()
    return StepRecord(
        [one, dead], chosen.trajectories, 4, tensors, count, count + 0.5, tensors.token_rewards, -count, None, None
    )


def test_rows_hold_the_steps_values_over_their_own_tokens(tmp_path: Path, record: StepRecord) -> None:
    files = StepFiles(build_settings(tmp_path, 10))
    file = files.write(20, record)
    assert file == step_file_path(tmp_path / "r", 20)
    rows = list(read_step(file))
    every = [t for g in record.groups for t in g.trajectories]
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
        assert row.engine_log_probs == pytest.approx(list(own.logprobs))
        assert row.returns_sum == pytest.approx(
            sum(value + 0.5 for value, mask in zip(row.advantages, own.loss_mask, strict=True) if mask)
        )
        assert row.token_rewards is not None
        assert sum(row.token_rewards) == pytest.approx(own.score.total)
        assert (row.reference_log_probs, row.values) == (None, None)
    assert rows[2].advantages is None
    assert rows[3].loss_mask is None


def test_other_tools_see_components_and_scores(tmp_path: Path, record: StepRecord) -> None:
    rows = pq.read_table(StepFiles(build_settings(tmp_path, 1)).write(1, record)).to_pylist()
    assert rows[0]["components"] == [{"name": "format", "raw": 1.0, "weighted": 0.0}]
    assert [row["score"] for row in rows] == [1.0, 0.0, 0.0, 1.0]
    assert [row["status"] for row in rows] == ["OK", "OK", "TIMEOUT", "OK"]


def test_every_nth_step_is_kept_and_a_step_taken_again_replaces_its_file(tmp_path: Path, record: StepRecord) -> None:
    files = StepFiles(build_settings(tmp_path, 10))
    assert [step for step in range(1, 31) if files.is_kept(step)] == [10, 20, 30]
    assert not any(StepFiles(build_settings(tmp_path, 0)).is_kept(step) for step in range(100))
    files.write(10, record)
    files.write(10, StepRecord(record.groups[:1], (), 4))
    assert [row.trained for row in read_step(step_file_path(tmp_path / "r", 10))] == [False] * 3
    assert list_saved_steps(tmp_path / "r") == [10]


def test_only_the_newest_files_stay_and_those_from_before_a_restart_do_not_count(
    tmp_path: Path, record: StepRecord
) -> None:
    files = StepFiles(build_settings(tmp_path, 10, "trainer.rollout_data_to_keep=2"))
    for step in (50, 10, 20):
        files.write(step, record)
    assert list_saved_steps(tmp_path / "r") == [10, 20, 50]
    files.write(30, record)
    assert list_saved_steps(tmp_path / "r") == [20, 30, 50]
