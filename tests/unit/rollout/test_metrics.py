"""What `/metrics` makes of the counts of many replicas."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from forage_common.clients.circuit import Circuit, CircuitOpenError
from forage_common.v1.trajectory_pb2 import Policy, PolicySegment, Trajectory, TrajectoryGroup
from forage_rollout.metrics import Shown, Snapshot, VersionTokens, call_counts, count_name


def page(shown: Shown) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(shown)
    lines = generate_latest(registry).decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def engines(**counts: dict[str, float]) -> dict[str, list[Snapshot]]:
    return {"Engine": [Snapshot(replica, of) for replica, of in counts.items()]}


def test_counts_of_replicas_are_summed_and_gauges_are_gauges() -> None:
    shown = Shown()
    one = {"sampled_tokens": 5.0, "requests_in_flight": 2.0}
    two = {"sampled_tokens": 6.0, "requests_in_flight": 1.0}
    queues = {"prompts_on_stream": 6}
    shown.update(engines(a=one, b=two), Policy(version=3, epoch=2), Policy(version=5, epoch=2), queues)
    found = page(shown)
    assert found["forage_rollout_sampled_tokens_total"] == 11
    assert found["forage_rollout_requests_in_flight"] == 3
    assert found['forage_rollout_replicas{deployment="Engine"}'] == 2
    assert found["forage_rollout_policy_version"] == 3
    assert found["forage_rollout_policy_epoch"] == 2
    assert found["forage_rollout_policy_announced_version"] == 5
    assert found["forage_rollout_prompts_on_stream"] == 6


def test_the_policy_of_each_engine_is_shown() -> None:
    shown = Shown()
    serving = [Snapshot(name, {}, Policy(version=version)) for name, version in (("a", 3), ("b", 4))]
    shown.update({"Engine": [*serving, Snapshot("starting", {})]}, None, None)
    found = page(shown)
    assert {name: value for name, value in found.items() if "replica_policy" in name} == {
        'forage_rollout_replica_policy_version{replica="a"}': 3,
        'forage_rollout_replica_policy_version{replica="b"}': 4,
    }


def test_a_replica_that_starts_again_takes_nothing_from_a_counter() -> None:
    shown = Shown()
    for counts in (
        engines(a={"turns": 10.0}, b={"turns": 4.0}),
        engines(b={"turns": 5.0}),
        engines(b={"turns": 5.0}, c={"turns": 3.0}),
        engines(b={"turns": 6.0}, c={"turns": 3.0}),
    ):
        shown.update(counts, None, None)
    assert page(shown)["forage_rollout_turns_total"] == 10 + 6 + 3


def test_labels_are_kept() -> None:
    shown = Shown()
    retries = count_name("call_retries", service="reward")
    shown.update(engines(a={retries: 1.0, count_name("call_retries", service="retriever"): 2.0}), None, None)
    shown.update(engines(a={retries: 4.0}), None, None)
    found = page(shown)
    assert found['forage_rollout_call_retries_total{service="reward"}'] == 4
    assert found['forage_rollout_call_retries_total{service="retriever"}'] == 2


def test_staleness_is_counted_in_tokens_since_the_last_look() -> None:
    shown, tokens = Shown(), VersionTokens()

    def look(announced: int) -> None:
        shown.update({"Agent": [Snapshot("a", tokens.counts)]}, None, Policy(version=announced, epoch=1))

    def sample(version: int, count: int) -> None:
        segment = PolicySegment(version=version, epoch=1, begin=2, end=2 + count)
        tokens.add(TrajectoryGroup(trajectories=[Trajectory(segments=[segment])]))

    sample(4, 10)
    look(4)
    sample(4, 5)
    look(7)
    look(7)
    found = page(shown)
    assert found['forage_rollout_token_staleness_bucket{le="0.0"}'] == 10
    assert found['forage_rollout_token_staleness_bucket{le="2.0"}'] == 10
    assert found['forage_rollout_token_staleness_bucket{le="3.0"}'] == 15
    assert found["forage_rollout_token_staleness_count"] == 15
    assert found["forage_rollout_token_staleness_sum"] == 15
    assert not any("tokens_of_version" in name for name in found)


def test_only_the_latest_versions_are_remembered() -> None:
    tokens = VersionTokens()
    for version in range(100):
        segment = PolicySegment(version=version, epoch=1, begin=0, end=1)
        tokens.add(TrajectoryGroup(trajectories=[Trajectory(segments=[segment])]))
    assert len(tokens.counts) == 32
    assert count_name("tokens_of_version", epoch=1, version=99) in tokens.counts


def test_an_open_circuit_shows_until_it_closes() -> None:
    now = [0.0]
    circuit = Circuit("oracle", "host:1", failures=2, open_s=1.0, clock=lambda: now[0])
    name = count_name("circuit_open", service="oracle")
    assert call_counts()[name] == 0
    for _ in range(2):
        with pytest.raises(TimeoutError), circuit.attempt():
            raise TimeoutError
    assert call_counts()[name] == 1
    with pytest.raises(CircuitOpenError), circuit.attempt():
        raise AssertionError("not reached")
    now[0] = 2.0
    with pytest.raises(TimeoutError), circuit.attempt():  # the probe fails: still one circuit, still open
        raise TimeoutError
    assert call_counts()[name] == 1
    now[0] = 4.0
    with circuit.attempt():
        pass
    assert call_counts()[name] == 0
    assert call_counts()[count_name("circuits_opened", service="oracle")] == 2
