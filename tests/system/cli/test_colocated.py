"""Trainer and engine in turns, as on one GPU; on a CPU vLLM goes through the motions of its sleep and frees nothing."""

from __future__ import annotations

import json
from collections.abc import Callable

from demo import Demo

STEPS = 3


def count_logged(demo: Demo, program: str, event: str) -> int:
    file = demo.run / "logs" / f"{program}.log"
    return file.read_text().count(f'"{event}"') if file.exists() else 0


def test_trainer_and_engine_take_turns_also_where_the_trainer_is_killed_in_its_own(
    small_demo: Callable[..., Demo],
) -> None:
    settings = ("trainer.placement=colocated", "trainer.max_staleness=0", "run.record_history=true")
    demo = small_demo(STEPS, "data.val_max_samples=4", *settings)
    demo.start("--seed", "2", "--base-port", str(demo.base_port))
    demo.wait_for(lambda: count_logged(demo, "trainer", "shift_taken") >= 3)
    demo.kill("trainer")
    assert demo.finish() == 0, demo.output[-3000:]
    summary = demo.summary
    assert summary["steps"] == STEPS
    assert summary["groups_issued"] == summary["groups_trained"] == STEPS * 4
    assert (summary["groups_lost"], summary["groups_duplicated"]) == (0, 0)
    assert summary["restarts_trainer"] == 1
    assert demo.history.violations == ()
    assert summary["logprob_diff_mean"] < 1e-3, "the trainer and the engine see the same policy"
    lines = [json.loads(line) for line in (demo.run / "metrics.jsonl").read_text().splitlines()]
    assert all({"sleep", "load", "offload"} <= line["seconds"].keys() for line in lines)
    assert count_logged(demo, "rollout", "engine_sleeps") >= STEPS
    assert demo.list_leftovers() == [], "the run left processes behind"
