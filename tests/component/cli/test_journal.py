"""A journal whose process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from forage_cli.runs.journal import Journal
from forage_proto.v1.trajectory_pb2 import Trajectory

ENDLESS = """
import sys
from pathlib import Path
from forage_cli.runs.journal import Journal
from forage_proto.v1.trajectory_pb2 import Trajectory
with Journal(Path(sys.argv[1]), Trajectory) as journal:
    number = 0
    while True:
        journal.append(Trajectory(id=str(number), token_ids=[7] * 50_000))
        sys.stdout.write(f"{number}\\n")
        sys.stdout.flush()
        number += 1
"""


def read_ids(file: Path) -> list[str]:
    with Journal(file, Trajectory) as journal:
        return [trajectory.id for trajectory in journal.read()]


def test_kill_9_loses_no_finished_item(tmp_path: Path) -> None:
    file = tmp_path / "journal.bin"
    with subprocess.Popen([sys.executable, "-c", ENDLESS, str(file)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        acknowledged = [next(writer.stdout) for _ in range(20)]
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged += writer.stdout.readlines()
    ids = read_ids(file)
    assert len(ids) >= len(acknowledged)
    assert ids == [str(number) for number in range(len(ids))]
