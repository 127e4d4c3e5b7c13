"""The whole stack in a Docker engine: it trains, is injured, is taken down and comes back. `make test-compose`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from compose_engine import PORTS, Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
STEPS = 5
JOBS = {"retriever", "reward", "rollout", "trainer", "redis"}
_BOOKS = """
import json
from forage_cli.runs.ledger import settle
from forage_common.settings import load_settings
from forage_common.streams.client import StreamClient
settings = load_settings()
client = StreamClient(settings.redis, settings.run.id)
print(json.dumps(settle(client).as_dict() | {
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


def test_the_stack_trains_through_a_death_and_loses_nothing_when_it_is_taken_down(stack: Stack) -> None:
    said = stack.up()
    for port in ("PROMETHEUS_PORT", "RETRIEVER_PORT"):
        assert f"http://127.0.0.1:{PORTS[port]}" in said

    stack.wait_for(lambda: stack.query("forage_trainer_step").get("trainer", 0) >= 1, 600)
    assert stack.ended("trainer") is None
    stack.kill("rollout")
    stack.wait_for(lambda: stack.state("rollout")["RestartCount"] == 1, 60)

    # Every target is seen again, and Prometheus has the trainer's figures.
    stack.wait_for(lambda: _up(stack) == dict.fromkeys(JOBS, 1.0), 600)
    stack.wait_for(lambda: stack.ended("trainer") is not None, 1200)
    assert stack.ended("trainer") == 0, stack.logs()
    assert stack.query("max_over_time(forage_trainer_total_steps[1h])") == {"trainer": STEPS}
    assert stack.query("sum by (job) (max_over_time(redis_stream_length[1h])) > 0").keys() == {"redis"}

    books = _books(stack)
    assert books["groups_lost"] == books["groups_duplicated"] == 0
    assert books["groups_trained"] == STEPS * 16
    assert (books["version"], books["steps"]) == (STEPS, STEPS)

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
    stack.wait_for(lambda: stack.ended("trainer") is not None, 600)
    assert stack.ended("trainer") == 0, stack.logs()
    assert _books(stack) == books

    stack.down(volumes=True)
    assert stack.leftovers() == []


def _up(stack: Stack) -> dict[str, float]:
    return stack.query("up")


def _books(stack: Stack) -> dict[str, Any]:
    found: dict[str, Any] = stack.python(_BOOKS)
    return found
