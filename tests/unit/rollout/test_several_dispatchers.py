"""Several dispatchers: their names, and how many there are."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forage_common.settings import RolloutSettings, Settings
from forage_rollout.deployments.autoscaling import ONGOING, count_wanted
from forage_rollout.deployments.cluster import limit_to_machine
from forage_rollout.worker_names import WorkerName


def test_services_of_other_addresses_have_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    one = WorkerName(Settings())
    other = WorkerName(Settings(rollout=RolloutSettings(grpc_address="127.0.0.1:9")))
    assert one.text.endswith("127.0.0.1:18630")
    assert other.text.endswith("127.0.0.1:9")


@pytest.mark.parametrize(("in_flight", "wanted"), [([], 0), ([10], 1), ([256], 1), ([300], 2), ([256, 256, 256], 3)])
def test_there_is_a_dispatcher_for_every_so_many_groups_in_flight(in_flight: list[int], wanted: int) -> None:
    context: Any = SimpleNamespace(
        aggregated_metrics={ONGOING: dict(enumerate(in_flight))} if in_flight else None,
        total_num_requests=0.0,
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 256.0),
    )
    replicas, state = count_wanted(context)
    assert (math.ceil(replicas), state) == (wanted, {}), "Serve keeps to the least and the most"


def test_a_machine_has_no_more_agents_and_dispatchers_than_cpus() -> None:
    settings = Settings()
    small = limit_to_machine(settings, 2).rollout
    assert (small.agent_replicas.max, small.dispatcher_replicas.max) == (2, 2)
    large = limit_to_machine(settings, 64).rollout
    assert (large.agent_replicas.max, large.dispatcher_replicas.max) == (8, 4)
    asked = RolloutSettings.model_validate({"agent_replicas": {"min": 3, "max": 5}})
    assert limit_to_machine(Settings(rollout=asked), 1).rollout.agent_replicas.max == 3, "what is asked for stays"
