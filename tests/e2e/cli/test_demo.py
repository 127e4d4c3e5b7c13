"""The shortest whole run: a demo of a few steps, in which the trainer is killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from demo import Demo
from waiting import WAIT_S, wait_until

STEPS = 4
NEVER_KILLED = ("redis", "reward", "retriever", "rollout", "console")
LIMIT_S = 1200.0


def check_console(demo: Demo) -> None:
    """Look at the run, and ask its policy, while it trains."""
    url = f"http://127.0.0.1:{demo.base_port + 50}"
    assert f"console  {url}" in demo.output

    def find_ready() -> dict[str, Any]:
        seen.append(httpx.get(f"{url}/api/runs/latest/health", timeout=WAIT_S).json())
        states = {service["name"]: service["state"] for service in seen[-1]["services"]}
        return seen[-1] if all(states.get(name) in ("ready", "slow") for name in NEVER_KILLED) else {}

    seen: list[dict[str, Any]] = []
    health = wait_until(find_ready, lambda: f"the console called {NEVER_KILLED} ready, but {seen[-1:]}")
    assert health["is_reachable"], health["problem"]
    assert health["version"] is not None
    assert {queue["name"] for queue in health["queues"]} == {"prompts", "trajectories"}
    assert health["redis"]["used_bytes"] > 0
    status = httpx.get(f"{url}/api/runs/latest/ask", timeout=WAIT_S).json()
    assert status["is_ready"], status["problem"]
    request = {"question": "What is the capital of Mongolia?", "environment": "single_turn"}
    events = httpx.post(f"{url}/api/runs/latest/ask", json=request, timeout=WAIT_S).text
    kinds = [json.loads(line[6:])["kind"] for line in events.splitlines() if line.startswith("data: ")]
    assert (kinds[0], kinds[-1]) == ("turn", "end"), events


@pytest.mark.timeout(2 * LIMIT_S)
def test_a_demo_whose_trainer_is_killed_completes_and_no_group_is_lost_or_duplicated(
    small_demo: Callable[..., Demo],
) -> None:
    demo = small_demo(STEPS, "data.val_max_samples=4", "trainer.max_staleness=0", "run.record_history=true")
    demo.start("--seed", "2", "--base-port", str(demo.base_port))
    demo.wait_for(lambda: demo.steps >= 1, LIMIT_S)
    check_console(demo)
    demo.kill("trainer")
    assert demo.finish(LIMIT_S) == 0, demo.output[-3000:]
    summary = demo.summary
    assert summary["steps"] == STEPS
    assert summary["groups_issued"] == summary["groups_trained"] == STEPS * 4
    assert (summary["groups_lost"], summary["groups_duplicated"]) == (0, 0)
    assert summary["restarts_trainer"] == 1
    rows = [json.loads(line) for line in (demo.run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "a step that was taken again has one line"
    for label, version in (("before", 0), ("after", STEPS)):
        result = json.loads((demo.run / "validation" / f"{label}.json").read_text())
        assert (result["version"], result["count"], result["failed"]) == (version, 4, 0)
    history = demo.history
    assert (history.violations, history.steps, history.is_complete) == ((), STEPS, True)
    counts = history.count_by_kind()
    assert set(counts) > {"issue", "claim_prompts", "finish", "claim_groups", "acknowledge", "publish", "load"}
    assert counts["acquire_epoch"]["ok"] == 2
    assert summary["logprob_diff_mean"] < 1e-3, "the trainer and the engine see the same policy"
    assert (demo.run / "report.html").stat().st_size > 0
    assert demo.list_leftovers() == [], "the run left processes behind"
