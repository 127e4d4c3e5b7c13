"""Several dispatchers: their names, and how many there are."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forage_queue.rollout.concurrency import count_most_groups
from forage_rollout.deployments.application import build_dispatcher_deployment, build_engine_deployment
from forage_rollout.deployments.autoscaling import ONGOING, count_wanted
from forage_rollout.deployments.cluster import limit_to_machine
from forage_rollout.worker_names import WorkerName
from forage_runtime.settings import RolloutSettings, Settings


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


@pytest.mark.parametrize(
    ("given", "dispatchers", "engines"),
    [
        ({}, 96, 64),  # four times 128 trajectories for each of two engines are 128 groups of eight
        ({"max_trajectories_in_flight": 100_000}, 192, 64),
        ({"max_trajectories_in_flight": 100_000, "max_groups_in_flight": 32, "engine": {"max_num_seqs": 16}}, 24, 12),
        ({"max_trajectories_in_flight": 100_000, "max_groups_in_flight": 1024}, 256, 64),
    ],
)
def test_replicas_that_are_full_want_another_one(given: dict[str, Any], dispatchers: float, engines: float) -> None:
    rollout = RolloutSettings.model_validate({"engine_replicas": {"max": 2}, "n": 8} | given)
    full = {"Dispatcher": count_most_groups(rollout), "Engine": rollout.engine.max_num_seqs}
    made = (
        build_dispatcher_deployment(object, Settings(rollout=rollout)),
        build_engine_deployment(object, Settings(rollout=rollout), rollout.engine_replicas, 0),
    )
    for deployment, target in zip(made, (dispatchers, engines), strict=True):
        scaling = deployment._deployment_config.autoscaling_config
        assert scaling.get_target_ongoing_requests() == target
        for replicas in (1, 2, 3):
            context: Any = SimpleNamespace(
                aggregated_metrics={ONGOING: dict.fromkeys(range(replicas), full[deployment.name])},
                total_num_requests=0.0,
                config=scaling,
            )
            assert count_wanted(context)[0] > replicas


def test_a_machine_has_no_more_agents_and_dispatchers_than_cpus() -> None:
    settings = Settings()
    small = limit_to_machine(settings, 2).rollout
    assert (small.max_agents, small.max_dispatchers) == (2, 2)
    large = limit_to_machine(settings, 64).rollout
    assert (large.max_agents, large.max_dispatchers) == (8, 4)
