"""The shortest whole run: a demo of a few steps, in which the trainer is killed."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest
from demo import Demo

STEPS = 4


def check_console(demo: Demo) -> None:
    """Look at the run, and ask its policy, while it trains."""
    url = f"http://127.0.0.1:{demo.base_port + 50}"
    assert f"console  {url}" in demo.output
    health = httpx.get(f"{url}/api/runs/latest/health", timeout=10).json()
    assert health["is_reachable"], health["problem"]
    states = {service["name"]: service["state"] for service in health["services"]}
    assert {states[name] for name in ("redis", "reward", "retriever", "rollout", "console")} == {"ready"}, states
    assert health["version"] is not None
    assert {queue["name"] for queue in health["queues"]} == {"prompts", "trajectories"}
    assert health["redis"]["used_bytes"] > 0
    status = httpx.get(f"{url}/api/runs/latest/ask", timeout=10).json()
    assert status["is_ready"], status["problem"]
    request = {"question": "What is the capital of Mongolia?", "environment": "single_turn"}
    events = httpx.post(f"{url}/api/runs/latest/ask", json=request, timeout=120).text
    kinds = [json.loads(line[6:])["kind"] for line in events.splitlines() if line.startswith("data: ")]
    assert (kinds[0], kinds[-1]) == ("turn", "end"), events


@pytest.mark.timeout(600)
def test_a_demo_whose_trainer_is_killed_completes_and_no_group_is_lost_or_duplicated(
    small_demo: Callable[..., Demo],
) -> None:
    demo = small_demo(STEPS, "data.val_max_samples=4", "trainer.max_staleness=0", "run.record_history=true")
    demo.start("--seed", "2", "--base-port", str(demo.base_port))
    demo.wait_for(lambda: demo.steps >= 1, 300)
    check_console(demo)
    demo.kill("trainer")
    assert demo.finish(300) == 0, demo.output[-3000:]
    summary = demo.summary
    assert summary["steps"] == STEPS
    assert summary["groups_issued"] == summary["groups_trained"] == STEPS * 4
    assert (summary["groups_lost"], summary["groups_duplicated"]) == (0, 0)
    assert summary["restarts_trainer"] == 1
    history = demo.history
    assert (history.violations, history.steps, history.is_complete) == ((), STEPS, True)
    counts = history.count_by_kind()
    assert set(counts) > {"issue", "claim_prompts", "finish", "claim_groups", "acknowledge", "publish", "load"}
    assert counts["acquire_epoch"]["ok"] == 2
    assert summary["logprob_diff_mean"] < 1e-3, "the trainer and the engine see the same policy"
    assert (demo.run / "report.html").stat().st_size > 0
    assert demo.list_leftovers() == [], "the run left processes behind"
