"""Durable files: two processes may write one file at a time, and what dead ones left is removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from waiting import WAIT_S

from forage_runtime.files import durable

WRITER = """
import sys
from pathlib import Path
from forage_runtime.files.durable import stage_file
with stage_file(Path(sys.argv[1])) as partial:
    partial.write_text("of the other")
    print(partial.name, flush=True)
    sys.stdin.readline()
"""


def start_writer(file: Path) -> subprocess.Popen[str]:
    """A process in the middle of writing; ends when it gets a line."""
    command = [sys.executable, "-c", WRITER, str(file)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_two_processes_write_one_file_and_each_leaves_a_whole_one(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    with start_writer(file) as other:
        assert other.stdout is not None
        partial = tmp_path / other.stdout.readline().strip()
        durable.write_atomically(file, "of this one")
        assert file.read_text() == "of this one"
        assert partial.read_text() == "of the other", "a living process lost what it was writing"
        other.communicate("go on\n", timeout=WAIT_S)
    assert other.returncode == 0
    assert file.read_text() == "of the other"
    assert list(tmp_path.iterdir()) == [file]


def test_what_a_dead_process_left_of_a_file_is_removed_by_the_next_writer(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    with start_writer(file) as other:
        assert other.stdout is not None
        partial = tmp_path / other.stdout.readline().strip()
        other.kill()
    assert partial.exists()
    (tmp_path / f"{durable.PARTIAL_PREFIX}other.json").touch()
    durable.write_atomically(file, "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".partial-other.json", "state.json"]


def test_on_another_machine_a_writer_is_dead_once_it_was_silent_for_long(tmp_path: Path) -> None:
    elsewhere = tmp_path / ".partial-another-host.1.00000000-a"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    assert not durable.is_abandoned(elsewhere)
    for path in (elsewhere / "file", elsewhere):
        os.utime(path, (0, 0))
    assert durable.is_abandoned(elsewhere)
    (elsewhere / "new").touch()
    os.utime(elsewhere, (0, 0))
    assert not durable.is_abandoned(elsewhere), "its writer is at work in the folder"


def test_what_a_process_with_this_id_wrote_before_this_one_is_abandoned(tmp_path: Path) -> None:
    own = durable.name_partial(tmp_path / "a")
    prefix, _, _ = own.name.rpartition(".")
    assert durable.is_abandoned(own.with_name(f"{prefix}.00000000-a"))
