"""Parts of a build run in processes; the first that fails stops the others, which keep what they have done."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import index_work
import pytest
from index_work import fail_when_begun, note, wait_for_ever
from waiting import wait_until

from forage_retriever.index.building.processes import run_all
from forage_runtime.errors import DataError, UserError


def test_work_runs_in_processes_and_reports(tmp_path: Path) -> None:
    reports: list[tuple[str, int, int | None]] = []
    names = ["a", "b"]
    run_all([partial(note, tmp_path, name) for name in names], 2, lambda *seen: reports.append(seen))
    assert sorted(reports) == [(f"shard {number}: {name}", 1, 2) for number, name in enumerate(names)]
    processes = {(tmp_path / name).read_text() for name in names}
    assert len(processes) == 2
    assert str(os.getpid()) not in processes


@pytest.mark.parametrize(
    ("kind", "error", "sentence"),
    [
        ("data", DataError, "shard 1: out of luck"),
        ("killed", UserError, "shard 1: its process was ended by signal 9: run the same command again, which resumes"),
    ],
)
def test_the_first_that_fails_stops_the_others(
    tmp_path: Path, kind: str, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        run_all([partial(wait_for_ever, tmp_path), partial(fail_when_begun, tmp_path, kind)], 2, lambda *_: None)
    assert (tmp_path / "unwound").exists()


def test_processes_end_with_a_killed_parent(tmp_path: Path) -> None:
    script = (
        "import sys; from functools import partial; from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from index_work import note_and_wait\n"
        "from forage_retriever.index.building.processes import run_all\n"
        "if __name__ == '__main__':\n"
        "    folder = Path(sys.argv[1])\n"
        "    run_all([partial(note_and_wait, folder, name) for name in 'ab'], 2, lambda *_: None)\n"
    )
    (tmp_path / "parent.py").write_text(script)
    importable = str(Path(index_work.__file__).parent)
    parent = subprocess.Popen([sys.executable, str(tmp_path / "parent.py"), str(tmp_path), importable])
    try:
        wait_until(lambda: (tmp_path / "a.pid").exists() and (tmp_path / "b.pid").exists())
    finally:
        parent.kill()
        parent.wait()
    children = [int((tmp_path / f"{name}.pid").read_text()) for name in "ab"]
    wait_until(lambda: not any(_is_running(child) for child in children))


def _is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
