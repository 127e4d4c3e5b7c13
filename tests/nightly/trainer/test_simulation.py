"""Hundreds of seeded schedules of a simulated run violate nothing, and those of a broken program do.

`make simulate SEEDS=10000` runs as many more as one likes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCHEDULES = 300
pytestmark = pytest.mark.timeout(3600)
"""They take a minute of two cores, which they share with other tests, and a busy machine any multiple of it."""


def simulate(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repository / "scripts/simulate.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=3500)


def read_result(ended: subprocess.CompletedProcess[str]) -> dict[str, int]:
    result: dict[str, int] = json.loads(ended.stdout.splitlines()[-1])
    return result


def test_hundreds_of_schedules_violate_nothing(repository: Path) -> None:
    ended = simulate(repository, str(SCHEDULES))
    result = read_result(ended)
    assert result["violations"] == 0, ended.stdout
    assert result["schedules"] == SCHEDULES
    assert result["faults"] > SCHEDULES


def test_every_broken_rule_is_noticed(repository: Path) -> None:
    ended = simulate(repository, "--broken-rules")
    assert read_result(ended)["unnoticed"] == 0, ended.stdout


def test_a_seed_has_one_history(repository: Path) -> None:
    histories = {simulate(repository, "--seed", "11").stdout for _ in range(2)}
    assert len(histories) == 1
    assert "FAULT" in histories.pop()
