"""Whole trajectories in Parquet: nothing is lost, and what is no such file is said so."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forage_common.errors import DataError
from forage_common.v1.trajectory_pb2 import (
    ActionKind,
    GroundTruth,
    PolicySegment,
    Role,
    Score,
    Span,
    Status,
    Trajectory,
    Turn,
)
from forage_records.trajectory_file import FileHeader, TrajectoryWriter, read_header, read_ids, read_trajectories


def build_trajectory(number: int) -> Trajectory:
    return Trajectory(
        id=f"run/world/test/{number}/0/0",
        run_id="run",
        group_uid=f"world/test/{number}/0",
        data_source="world",
        token_ids=[1, 2, 3, number],
        prompt_length=2,
        loss_mask=[1, 1],
        turn_ids=[1, 1],
        logprobs=[-0.1, -1.2345678],
        segments=[PolicySegment(version=number, epoch=1, begin=0, end=2)],
        spans=[Span(role=Role.ROLE_PROMPT, begin=0, end=2, text="Who? 誰"), Span(role=Role.ROLE_MODEL, text="me")],
        turns=[Turn(index=1, action=ActionKind.ACTION_KIND_ANSWER, content="me", tag="answer")],
        score=Score(status=Status.STATUS_OK, total=0.5, reward="search_r1_format"),
        status=Status.STATUS_OK,
        finished=True,
        ground_truth=GroundTruth(targets=["me", "myself"]),
    )


def test_written_trajectories_are_read_back_bit_for_bit(tmp_path: Path) -> None:
    file = tmp_path / "new" / "out.parquet"
    many = [build_trajectory(number) for number in range(600)]  # several row groups
    with TrajectoryWriter(file, "<|im_end|>") as writer:
        for one in many:
            writer.write(one)
        assert not file.exists()  # it appears whole, or not at all
    assert read_header(file) == FileHeader(600, "<|im_end|>")
    assert list(read_trajectories(file)) == many
    assert read_ids(file) == {one.id for one in many}


def test_other_tools_see_columns(tmp_path: Path) -> None:
    file = tmp_path / "out.parquet"
    with TrajectoryWriter(file, "") as writer:
        writer.write(build_trajectory(7))
        writer.write(Trajectory(id="failed", status=Status.STATUS_TIMEOUT))
    first, failed = pq.read_table(file).to_pylist()
    assert (first["prompt"], first["response"], first["answer"]) == ("Who? 誰", "me", "me")
    assert (first["targets"], first["status"], first["score"]) == (["me", "myself"], "OK", 0.5)
    assert (first["policy_version"], first["turns"], first["finished"]) == (7, 1, True)
    assert (failed["status"], failed["score"], failed["answer"]) == ("TIMEOUT", None, None)


def test_a_file_is_kept_after_an_interruption_and_can_be_continued(tmp_path: Path) -> None:
    file = tmp_path / "out.parquet"

    def write_interrupted() -> None:
        with TrajectoryWriter(file, "<end>") as writer:
            writer.write(build_trajectory(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_interrupted()
    assert read_ids(file) == {build_trajectory(1).id}
    with TrajectoryWriter(file, "<end>", keep=True) as writer:
        assert writer.statuses == {"OK": 1}
        writer.write(build_trajectory(2))
    assert list(read_trajectories(file)) == [build_trajectory(1), build_trajectory(2)]
    with TrajectoryWriter(file, "<end>") as writer:
        writer.write(build_trajectory(3))
    assert list(read_trajectories(file)) == [build_trajectory(3)]
    assert [left.name for left in tmp_path.iterdir()] == ["out.parquet"]


def test_a_file_without_trajectories_is_refused_by_name(tmp_path: Path) -> None:
    text, other, newer, damaged = (tmp_path / name for name in ("text", "other", "newer", "damaged"))
    text.write_text("no parquet")
    pq.write_table(pa.table({"id": ["a"]}), other)
    pq.write_table(pa.table({"trajectory": [b""]}).replace_schema_metadata({"forage.trajectories": "2"}), newer)
    pq.write_table(pa.table({"trajectory": [b"\xff"]}).replace_schema_metadata({"forage.trajectories": "1"}), damaged)
    for file, sentence in (
        (tmp_path / "missing", "cannot be read as Parquet"),
        (text, "cannot be read as Parquet"),
        (other, "are not complete trajectories"),
        (newer, "of version '2', not '1'"),
        (damaged, "row 1 holds no trajectory"),
    ):
        with pytest.raises(DataError, match=sentence) as error:
            list(read_trajectories(file))
        assert str(file) in str(error.value)
    with pytest.raises(DataError, match="are not complete trajectories"):
        TrajectoryWriter(other, "", keep=True)
    assert pq.read_table(other).num_rows == 1  # it is as it was
