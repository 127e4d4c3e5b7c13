"""The death of a process that is named as Ray's raylet, seen by the process that started it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from waiting import wait_until

from forage_runtime.ray_environment import has_raylet_ended


def test_only_the_end_of_the_last_raylet_counts(tmp_path: Path) -> None:
    program = shutil.copy(shutil.which("sleep") or "", tmp_path / "raylet")
    assert not has_raylet_ended(), "none was started"
    first = subprocess.Popen([program, "600"])
    assert not has_raylet_ended()
    first.kill()
    wait_until(has_raylet_ended)
    with subprocess.Popen([program, "600"]) as second:
        assert not has_raylet_ended(), "another one has begun"
        second.kill()
        os.waitid(os.P_PID, second.pid, os.WEXITED | os.WNOWAIT)  # a zombie, too
        assert has_raylet_ended()
    first.wait()
    assert not has_raylet_ended(), "nobody's child"
