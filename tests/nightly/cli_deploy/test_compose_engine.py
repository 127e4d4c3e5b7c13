"""The whole stack in a Docker engine: it trains, survives a kill, is stopped and started again. `make test-compose`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from compose_engine import PORTS, Stack

pytestmark = [pytest.mark.timeout(7200)]
STEPS = 5
JOBS = {"retriever", "reward", "rollout", "trainer", "console", "redis"}
_LEDGER = """
import json
from forage_cli.runs.ledger import count_groups
from forage_runtime.settings import load_settings
from forage_queue.streams.client import StreamClient
settings = load_settings()
client = StreamClient(settings.redis, settings.run.id)
print(json.dumps(vars(count_groups(client)) | {
    "version": client.read_policy().version,
    "steps": len((settings.run.folder / "metrics.jsonl").read_text().splitlines()),
    "checkpoints": sorted(path.name for path in (settings.run.folder / "checkpoints").glob("step_*")),
}))
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("compose"), STEPS)
    stack.require()
    stack.build()
    stack.down(volumes=True)
    try:
        yield stack
    finally:
        stack.down(volumes=True)


def test_no_group_is_lost_or_duplicated_by_a_kill_and_a_restart_of_the_stack(stack: Stack) -> None:
    output = stack.up()
    for port in ("PROMETHEUS_PORT", "RETRIEVER_PORT", "CONSOLE_PORT"):
        assert f"http://127.0.0.1:{PORTS[port]}" in output

    stack.wait_for(lambda: stack.query("forage_trainer_step").get("trainer", 0) >= 1, 600)
    assert stack.read_exit_code("trainer") is None
    stack.kill("rollout")
    stack.wait_for(lambda: stack.inspect("rollout")["RestartCount"] == 1, 60)

    # Every target is up again, and Prometheus has the trainer's metrics.
    stack.wait_for(lambda: stack.query("up") == dict.fromkeys(JOBS, 1.0), 600)
    stack.wait_for(lambda: stack.read_exit_code("trainer") is not None, 1200)
    assert stack.read_exit_code("trainer") == 0, stack.read_logs()
    assert stack.query("max_over_time(forage_trainer_total_steps[1h])") == {"trainer": STEPS}
    assert stack.query("sum by (job) (max_over_time(redis_stream_length[1h])) > 0").keys() == {"redis"}

    ledger = _read_ledger(stack)
    assert ledger["groups_lost"] == ledger["groups_duplicated"] == 0
    assert ledger["groups_trained"] == STEPS * 16
    assert (ledger["version"], ledger["steps"]) == (STEPS, STEPS)

    answer = stack.compose(
        "run",
        "--rm",
        "--no-deps",
        "forage",
        "ask",
        "What is the capital of Mongolia?",
        "-c",
        "/etc/forage/settings.yaml",
    )
    assert "Mongolia" in answer

    stack.down()
    stack.up()
    stack.wait_for(lambda: stack.read_exit_code("trainer") is not None, 600)
    assert stack.read_exit_code("trainer") == 0, stack.read_logs()
    assert _read_ledger(stack) == ledger

    stack.down(volumes=True)
    assert stack.list_resources() == []


def _read_ledger(stack: Stack) -> dict[str, Any]:
    ledger: dict[str, Any] = stack.python(_LEDGER)
    return ledger
