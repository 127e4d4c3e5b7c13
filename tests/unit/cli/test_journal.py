"""The journal of finished items survives kills and partial writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage_cli.runs.journal import Journal
from forage_proto.v1.trajectory_pb2 import Trajectory
from forage_runtime.errors import DataError, UserError


def read_ids(file: Path) -> list[str]:
    with Journal(file, Trajectory) as journal:
        return [trajectory.id for trajectory in journal.read()]


def test_the_next_process_reads_appended_items_in_order(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "journal.bin"
    assert read_ids(file) == []
    with Journal(file, Trajectory) as journal:
        journal.append(Trajectory(id="a"))
        assert [trajectory.id for trajectory in journal.read()] == ["a"]
        journal.append(Trajectory(id="b"))
    assert read_ids(file) == ["a", "b"]


@given(cut=st.integers(0, 200), junk=st.sampled_from([b"", b"\0" * 40]))
def test_a_partial_record_at_the_end_is_truncated_and_work_continues(
    tmp_path_factory: pytest.TempPathFactory, cut: int, junk: bytes
) -> None:
    file = tmp_path_factory.mktemp("torn") / "journal.bin"
    ends = []
    with Journal(file, Trajectory) as journal:
        for name in ("first", "second", "third"):
            journal.append(Trajectory(id=name * 5))
            ends.append(file.stat().st_size)
    file.write_bytes(file.read_bytes()[:cut] + (junk if cut in ends else b""))
    whole = sum(end <= cut for end in ends)
    with Journal(file, Trajectory) as journal:
        journal.append(Trajectory(id="after"))
    assert read_ids(file) == [*["first" * 5, "second" * 5, "third" * 5][:whole], "after"]


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "journal.bin"
    with Journal(file, Trajectory) as journal:
        journal.append(Trajectory(id="first"))
        journal.append(Trajectory(id="second"))
    content = bytearray(file.read_bytes())
    content[10] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"journal\.bin is damaged at byte 8 \(its checksum is wrong\): remove it"):
        Journal(file, Trajectory)


def test_two_writers_at_a_time_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "journal.bin"
    with Journal(file, Trajectory), pytest.raises(UserError, match="being written by another process"):
        Journal(file, Trajectory)
    Journal(file, Trajectory).close()


def test_a_file_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"journal\.bin cannot be written \(.*\): choose another place"):
        Journal(tmp_path / "file" / "journal.bin", Trajectory)
