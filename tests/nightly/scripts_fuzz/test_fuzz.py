"""`make fuzz` in small: 2,000 inputs a wire find nothing."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

PER_WIRE = 2_000


def run_fuzz(repository: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """The exit code, the object of the last line, and all that was printed."""
    command = [str(repository / ".venvs/console/bin/python"), "scripts/fuzz.py", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FORAGE__")}
    ended = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    return ended.returncode, json.loads(ended.stdout.splitlines()[-1]), ended.stdout + ended.stderr


def test_no_input_crashes_a_process_or_makes_it_hang_or_grow(repository: Path, tmp_path: Path) -> None:
    listed = subprocess.check_output(
        [str(repository / ".venvs/console/bin/python"), "scripts/fuzz.py", "--list"], cwd=repository, text=True
    )
    wires = listed.split()
    assert len(wires) >= 9
    count = PER_WIRE * len(wires)
    failures = str(tmp_path / "failures")
    code, result, printed = run_fuzz(repository, "--inputs", str(count), "--limit-s", "120", "--failures", failures)
    assert (code, result["inputs"]) == (0, count), printed
    assert (result["crashes"], result["errors_5xx"], result["hangs"]) == (0, 0, 0), printed
    assert result["rss_growth"] <= result["rss_growth_limit"], printed
