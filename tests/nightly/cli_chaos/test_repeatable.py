"""A repeatable run in which processes are killed -9 ends with the same bits as one that nothing disturbs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from demo import FORAGE, Demo

STEPS = 5
SHORT = ("trainer.val_before_train=false", "data.val_max_samples=4", "trainer.actor.optim.lr=1e-3")


def complete(demo: Demo, *kills: tuple[int, str]) -> Path:
    """Run to the end; kill each program once, after a number of steps. Returns the run's folder."""
    demo.start("--config", "configs/repeatable.yaml", "--seed", "5", "--base-port", str(demo.base_port))
    for step, program in kills:
        demo.wait_for(lambda step=step: demo.steps >= step)
        demo.kill(program)
    assert demo.finish() == 0, demo.output[-3000:]
    assert demo.summary["steps"] == STEPS
    assert (demo.summary["groups_lost"], demo.summary["groups_duplicated"]) == (0, 0)
    assert demo.summary["restarts"] >= len(kills)
    return demo.run


def test_a_run_with_kills_is_equal_to_the_bit_to_one_without(small_demo: Callable[..., Demo], repository: Path) -> None:
    whole = complete(small_demo(STEPS, *SHORT))
    broken = complete(small_demo(STEPS, *SHORT), (1, "redis"), (3, "trainer"), (3, "rollout"))
    assert whole != broken
    compared = subprocess.run(
        [*FORAGE, "compare-runs", str(whole), str(broken)], cwd=repository, capture_output=True, text=True, check=False
    )
    assert compared.returncode == 0, compared.stdout + compared.stderr
    result = json.loads(compared.stdout.splitlines()[-1])
    assert result == {
        "steps": STEPS,
        "tokens_digests_equal": STEPS,
        "weights_digests_equal": STEPS,
        "first_difference": None,
    }
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert len({row["weights_digest"] for row in rows}) == STEPS, "every step changed the weights"
    assert sum(row["failed"] for row in rows) == 0
