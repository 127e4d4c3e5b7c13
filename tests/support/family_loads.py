"""Loads in place of tiny random families, in processes of `served_families.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
NOISE = 1e-5
"""Largest difference of float32 log-probabilities that two starts of an engine may have."""


def measure_families(kinds: list[str], folder: Path) -> None:
    """Require of every family that loads in place, there and back, give what a fresh start gives."""
    command = [sys.executable, str(SUPPORT / "served_families.py"), str(folder), *kinds]
    environment = os.environ | {"PYTHONPATH": str(SUPPORT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8", check=False)
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    found = {line.pop("kind"): line for line in lines}
    assert [*found] == kinds, ended.stderr[-4000:]
    wrong = {
        kind: line
        for kind, line in found.items()
        if "error" in line or max(line["there"], line["back"]) > NOISE or line["moved"] < 1000 * NOISE
    }
    assert not wrong, f"{wrong}\n{ended.stderr[-4000:]}"
