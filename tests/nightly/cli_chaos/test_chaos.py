"""Faults of cheap kinds strike two runs at seeded instants: nothing is lost, twice, stale, and nothing hangs.

One run's trainer sends its policies, the other's are in an object store. `make chaos` has all kinds and transports, and
as many faults as one likes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(3600)]  # of a hang: chaos itself has limits for each recovery
KILLS = 14
SEED = 15
KINDS = (
    "kill-redis",
    "kill-reward",
    "kill-reward-worker",
    "kill-retriever",
    "kill-dispatcher",
    "kill-agent",
    "kill-engine-core",
    "stop-reward-worker",
    "torn-redis-log",
    "damaged-checkpoint",
    "damaged-copy",
    "kill-publishing",
    "redis-maxmemory",
)


def test_faults_lose_nothing_and_hang_nothing(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(repository / "scripts/chaos.py"), str(KILLS), "--seed", str(SEED)]
    command += ["--kinds", ",".join(KINDS), "--calm-s", "5", "--folder", str(tmp_path)]
    command += ["--transports", "direct,s3", "--per-episode", str(KILLS // 2)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=repository)
    sys.stdout.write(ended.stdout)
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["problems"] == [], ended.stdout
    assert (result["lost"], result["duplicated"], result["hung"]) == (0, 0, 0)
    assert result["stale"] == 0
    assert result["kills"] == KILLS
    assert result["skipped"] == {}
    assert result["operations"] > 0, "the history was not verified"
    for name, counts in result["transports"].items():
        assert counts["applied"] > 0, f"{name}: no delta was loaded"
        assert counts["told_apart"] > 0, f"{name}: no token was recomputed that shows its policy"
    assert result["transports"]["direct"]["sent"] > 0
