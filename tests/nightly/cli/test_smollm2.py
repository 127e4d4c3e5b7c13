"""The recipe with a model that we did not make, run as a user runs it: fetched, converted and trained."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from demo import FORAGE, REPOSITORY, Demo

RUN_S = 7200.0
SHORT = ["trainer.total_training_steps=2", "trainer.save_freq=2", "data.val_max_samples=2"]


@pytest.fixture
def demo(tmp_path: Path, free_base_port: Callable[[], int]) -> Iterator[Demo]:
    demo = Demo(tmp_path, free_base_port(), [*SHORT, f"model.path={tmp_path}/model"])
    yield demo
    demo.end()


@pytest.mark.timeout(8000)
def test_smollm2_is_fetched_converted_and_trained(tmp_path: Path, demo: Demo) -> None:
    fetched = subprocess.run(
        [*FORAGE, "model", "smollm2", "--out", str(tmp_path / "model")], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert fetched.returncode == 0, fetched.stderr
    base_port = str(demo.base_port)
    demo.start("--config", "configs/smollm2.yaml", "--no-console", "--base-port", base_port)
    assert demo.finish(RUN_S) == 0, demo.output
    steps = [json.loads(line) for line in (demo.run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    # Both compute in fp32; without a right model they are far apart.
    assert all(step["logprob_diff_mean"] < 1e-4 for step in steps)
    summary = demo.summary
    assert (summary["groups_lost"], summary["groups_duplicated"], summary["restarts"]) == (0, 0, 0)
