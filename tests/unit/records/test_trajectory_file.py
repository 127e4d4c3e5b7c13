"""Whole trajectories in Parquet: nothing is lost, and what is no such file is said so."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forage_proto.v1.trajectory_pb2 import (
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
from forage_records.trajectory_file import (
    FileHeader,
    TrajectoryWriter,
    extract_question,
    read_header,
    read_ids,
    read_trajectories,
    read_with_columns,
)
from forage_runtime.errors import DataError


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
        validation_score=Score(status=Status.STATUS_OK, total=1.0),
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
    assert (first["question"], first["reason"], first["em"], first["response_tokens"]) == ("Who? 誰", None, 1.0, 2)
    assert (first["policy_version_min"], failed["policy_version_min"]) == (7, None)
    assert (failed["status"], failed["score"], failed["answer"]) == ("TIMEOUT", None, None)
    assert (failed["reason"], failed["em"]) == ("failed: TIMEOUT", None)


@pytest.mark.parametrize(
    ("prompt", "end", "question"),
    [
        ("<|im_start|>user\nUse <search>. Question: Who?\n<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>", "Who?"),
        ("<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nWho\nis it?<|im_end|>\n<|im_start|>assistant\n",
         "<|im_end|>", "Who\nis it?"),
        ("<|start_header_id|>user<|end_header_id|>\n\nWho?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
         "<|eot_id|>", "Who?"),
        ("<bos><start_of_turn>user\nWho?<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>", "Who?"),
        ("Which user\nasks?", "<|im_end|>", "Which user\nasks?"),
        ("Question: first? Question: second?", "", "second?"),
        ("a plain text", "", "a plain text"),
        ("", "<|im_end|>", ""),
    ],
)  # fmt: skip
def test_the_question_is_found_in_a_rendered_prompt(prompt: str, end: str, question: str) -> None:
    assert extract_question(prompt, end) == question


def test_a_long_trajectory_can_be_read_without_its_neighbours(tmp_path: Path) -> None:
    file = tmp_path / "out.parquet"
    long = [build_trajectory(number) for number in range(20)]
    for one in long:
        one.spans[1].text = "word " * 200_000
    with TrajectoryWriter(file, "", extra_columns=[("values", pa.list_(pa.float32()))]) as writer:
        for number, one in enumerate(long):
            writer.write(one, {"values": [float(number)] * 3})
    metadata = pq.read_metadata(file)
    sizes = [metadata.row_group(place).num_rows for place in range(metadata.num_row_groups)]
    assert max(sizes) <= 5, "about 2 MB a row: the response twice"
    assert sum(sizes) == 20
    assert list(read_trajectories(file)) == long
    for number in (0, 7, 19):
        assert list(read_with_columns(file, ["values"], ["later"], only=[number])) == [
            (long[number], {"values": [number] * 3, "later": None})
        ]
    assert [one for one, _ in read_with_columns(file, [], only={19, 0, 1, 7})] == [long[at] for at in (0, 1, 7, 19)]
    for missing in (-1, 20):
        with pytest.raises(DataError, match=f"has no row {missing}: it has 20, from 0"):
            list(read_with_columns(file, [], only=[missing]))


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
