"""Files of steps: what queries need is a column, and files of before are still read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forage_proto.v1.trajectory_pb2 import ActionKind, Status, Trajectory, Turn
from forage_records.step_file import Fate, GroupFate, StepRow, read_group_fates, read_step, read_step_row, write_step
from forage_records.trajectory_rows import Filter
from forage_runtime.errors import DataError


def build_row(number: int = 0) -> StepRow:
    """A search, an observation of two tokens, and an answer of which one token was not trained on."""
    trajectory = Trajectory(
        id=f"r/u/{number}",
        token_ids=range(8),
        prompt_length=1,
        loss_mask=[1, 1, 0, 0, 1, 1, 1],
        turn_ids=[1, 1, -1, -1, 2, 2, 2],
        logprobs=[0.0] * 7,
        turns=[
            Turn(index=1, action=ActionKind.ACTION_KIND_SEARCH),
            Turn(index=2, action=ActionKind.ACTION_KIND_ANSWER),
        ],
        status=Status.STATUS_OK,
    )
    return StepRow(
        trajectory,
        step=10,
        version=9,
        trained=True,
        loss_mask=[1, 1, 0, 0, 1, 1, 0],
        advantages=[1.0, 2.0, 50.0, 50.0, -3.0, -4.0, 50.0],
        log_probs=[-1.0, -2.0, -9.0, -9.0, -1.0, -1.0, -1.5],
        engine_log_probs=[-1.0, -2.25, 0.0, 0.0, -1.0, -1.0, -1.0],
        entropies=[0.5] * 7,
    )


def test_derived_columns_are_of_the_tokens_that_count(tmp_path: Path) -> None:
    file = tmp_path / "step.parquet"
    untrained = StepRow(build_row(1).trajectory, 10, 9, trained=False, reason="group dead: 1 of 2")
    answered = build_row(2)
    answered.trajectory.turns[0].action = ActionKind.ACTION_KIND_INVALID
    rows = [build_row(), untrained, answered, replace(build_row(3), loss_mask=[0] * 7)]
    write_step(file, "", rows)
    table = pq.read_table(file)
    assert table["advantage_mean"].to_pylist() == [-1.0, None, -1.0, None]
    assert table["search_advantage"].to_pylist() == [1.5, None, None, None]
    assert table["mismatch_max"].to_pylist() == [0.5, None, 0.5, 0.5], "of the policy's tokens, trained on or not"
    assert table["reason"].to_pylist() == [None, "group dead: 1 of 2", None, None]
    assert table.column_names.count("reason") == 1
    assert list(read_step(file)) == rows
    assert read_step_row(file, 1) == untrained
    with pytest.raises(DataError, match="has no row 4"):
        read_step_row(file, 4)


def test_a_file_of_before_is_read(tmp_path: Path) -> None:
    new, old = tmp_path / "new.parquet", tmp_path / "old.parquet"
    write_step(new, "", [build_row()], [GroupFate("u", 0, 0, Fate.TRAINED)])
    added = (
        "question em reason advantage_mean search_advantage mismatch_max response_tokens policy_version_min entropies"
    )
    table = pq.read_table(new).drop_columns(added.split())
    kept = {key: value for key, value in table.schema.metadata.items() if key != b"forage.groups"}
    pq.write_table(table.replace_schema_metadata(kept), old)
    assert list(read_step(old)) == [replace(build_row(), entropies=None)]
    assert read_step_row(old, 0).entropies is None
    assert read_group_fates(old) is None
    pq.write_table(table.drop_columns(["advantages"]).replace_schema_metadata(kept), old)
    with pytest.raises(DataError, match="has no column 'advantages'"):
        list(read_step(old))


def test_the_fate_of_every_group_is_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "step.parquet"
    fates = [
        GroupFate("world/train/1/0", 0, 0, Fate.TRAINED),
        GroupFate("world/train/2/0", 1, 1, Fate.DEAD, "1 valid trajectory, and grpo needs 2"),
        GroupFate("", 2, 0, Fate.DROPPED, "straggler: it did not arrive in time"),
    ]
    write_step(file, "", [], fates)
    assert read_group_fates(file) == fates
    write_step(file, "", [])
    assert read_group_fates(file) == []
    metadata = pq.read_schema(file).metadata | {
        b"forage.groups": b'[{"uid":"a","position":3,"attempt":0,"fate":"dead","more":1}]'
    }
    pq.write_table(pa.schema(pq.read_schema(file)).empty_table().replace_schema_metadata(metadata), file)
    assert read_group_fates(file) == [GroupFate("a", 3, 0, Fate.DEAD)], "a field of later versions is left out"


def test_an_answer_that_was_not_judged_is_neither_right_nor_wrong() -> None:
    rows = [{"uid": "a/b/0/0", "question": "q", "spans": [], "em": em} for em in (None, 0.0, 1.0)]
    for right, expected in ((True, [1.0]), (False, [0.0]), (None, [None, 0.0, 1.0])):
        assert [row["em"] for row in filter(Filter(right), rows)] == expected


@pytest.mark.parametrize("content", [b"{", b"[1]", b'[{"fate": "eaten"}]', b'[{"uid": "a"}]', b"3", b"\xff"])
def test_damaged_fates_of_groups_are_one_sentence(tmp_path: Path, content: bytes) -> None:
    whole, file = tmp_path / "whole.parquet", tmp_path / "step-000001.parquet"
    write_step(whole, "", [build_row()])
    table = pq.read_table(whole)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"forage.groups": content}), file)
    with pytest.raises(DataError, match="does not say what became of its groups"):
        read_group_fates(file)


def test_a_column_whose_name_is_no_text_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "step-000001.parquet"
    write_step(file, "", [build_row()])
    file.write_bytes(file.read_bytes().replace(b"mismatch_max", b"mismatch_\xffax"))
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        list(read_step(file))


def test_a_column_with_fewer_values_than_tokens_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "step-000001.parquet"
    write_step(file, "", [build_row()])
    table = pq.read_table(file)
    place = table.schema.get_field_index("engine_log_probs")
    shorter = pa.array([[0.0]], table.schema.field(place).type)
    pq.write_table(table.set_column(place, table.schema.field(place), shorter), file)
    with pytest.raises(DataError, match="has 1 of engine_log_probs and 7 tokens"):
        list(read_step(file))
    with pytest.raises(DataError, match="restore the file"):
        read_step_row(file, 0)
