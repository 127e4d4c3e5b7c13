"""The workspace of a process that was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forage_retriever.index.workspace import hold_workspace


def test_the_workspace_of_a_killed_process_is_resumed(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from forage_retriever.index.workspace import hold_workspace\n"
        "with hold_workspace(Path(sys.argv[1]), Path(sys.argv[2]), lambda: None) as workspace:\n"
        "    workspace.stage('part', 'key', lambda folder: (folder / 'file').write_text('whole'))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, tmp_path / "work", tmp_path / "final"])
    assert killed.returncode == -9
    written = (tmp_path / "work/index/part/file").stat().st_mtime_ns
    with hold_workspace(tmp_path / "work", tmp_path / "final", lambda: None) as workspace:
        assert workspace is not None
        workspace.stage("part", "key", lambda _: pytest.fail("it is there already"))
        workspace.finish(tmp_path / "final")
    assert (tmp_path / "final/part/file").stat().st_mtime_ns == written
