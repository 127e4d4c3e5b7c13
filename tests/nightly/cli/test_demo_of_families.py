"""The demo with a tiny random model of kinds that are hard to load in place: what is served is what was trained."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from demo import REPOSITORY, Demo

RUN_S = 3600.0
STEPS = 3
SHORT = [
    f"trainer.total_training_steps={STEPS}",
    "trainer.max_staleness=0",  # every token is of the policy that is trained
    "data.val_max_samples=8",
]


@pytest.mark.timeout(4000)
@pytest.mark.parametrize("kind", ["gpt_oss", "mamba2", "mixtral", "qwen3_moe"])
def test_engines_serve_what_was_trained_in_every_step(
    tmp_path: Path, free_base_port: Callable[[], int], kind: str
) -> None:
    model = tmp_path / kind
    build = [REPOSITORY / ".venvs/trainer/bin/python", REPOSITORY / "tests/support/demo_family.py", kind, model]
    subprocess.run(build, check=True, capture_output=True)
    demo = Demo(tmp_path, free_base_port(), [*SHORT, f"model.path={model}"])
    try:
        demo.start("--no-console", "--base-port", str(demo.base_port))
        assert demo.finish(RUN_S) == 0, demo.output
        lines = [json.loads(line) for line in (demo.run / "metrics.jsonl").read_text().splitlines()]
        assert len(lines) == STEPS
        assert all(line["logprob_diff_mean"] <= 1e-5 for line in lines), lines
        assert (demo.summary["groups_lost"], demo.summary["groups_duplicated"], demo.summary["restarts"]) == (0, 0, 0)
        assert '"policy_refused"' not in (demo.run / "logs/rollout.log").read_text()
    finally:
        demo.end()
