"""What the Redis of compose and of the chart starts with is what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_files_of_redis_are_current(repository: Path) -> None:
    command = [sys.executable, str(repository / "scripts/redis_files.py"), "--check"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
