"""Every process is killed -9 once during one run; the run completes, nothing is lost, nothing is trained on twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from demo import Demo

pytestmark = [pytest.mark.timeout(900)]
STEPS = 7


def test_a_run_continues_after_a_kill_of_each_of_its_processes(small_demo: Callable[[int], Demo]) -> None:
    demo = small_demo(STEPS)
    demo.start("--seed", "3", "--base-port", str(demo.base_port))
    for step, program in ((1, "trainer"), (2, "rollout"), (3, "reward"), (4, "retriever"), (5, "redis")):
        demo.wait_for(lambda step=step: demo.steps >= step, 400)
        demo.kill(program)
    assert demo.finish(400) == 0, demo.output[-3000:]
    summary = demo.summary
    assert summary["steps"] == STEPS
    assert summary["groups_issued"] == summary["groups_trained"] == STEPS * 4
    assert summary["groups_lost"] == 0
    assert summary["groups_duplicated"] == 0
    restarted = {name.removeprefix("restarts_") for name in summary if name.startswith("restarts_") and summary[name]}
    assert restarted == {"trainer", "rollout", "reward", "retriever", "redis"}
    assert summary["em_after"] is not None
    assert demo.list_leftovers() == [], "the run left processes behind"
