"""The metrics page, from the snapshots of many replicas."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from forage_proto.v1.trajectory_pb2 import Policy, PolicySegment, Trajectory, TrajectoryGroup
from forage_rollout.metrics import CountKey, RolloutCollector, Snapshot, VersionTokens, read_call_counts
from forage_runtime.clients.circuit import Circuit, CircuitOpenError


@pytest.fixture
def collector() -> RolloutCollector:
    return RolloutCollector()


def read_page(collector: RolloutCollector) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(collector)
    lines = generate_latest(registry).decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def build_engines(**counts: dict[CountKey, float]) -> dict[str, list[Snapshot]]:
    return {"Engine": [Snapshot(replica, its_counts) for replica, its_counts in counts.items()]}


def test_counters_and_gauges_are_summed_over_replicas(collector: RolloutCollector) -> None:
    one = {("sampled_tokens",): 5.0, ("requests_in_flight",): 2.0}
    two = {("sampled_tokens",): 6.0, ("requests_in_flight",): 1.0}
    queues = {"prompts_on_stream": 6}
    for _ in range(2):
        collector.update(build_engines(a=one, b=two), Policy(version=3, epoch=2), Policy(version=5, epoch=2), queues)
    page = read_page(collector)
    assert page["forage_rollout_sampled_tokens_total"] == 11
    assert page["forage_rollout_requests_in_flight"] == 3
    assert page['forage_rollout_replicas{deployment="Engine"}'] == 2
    assert page["forage_rollout_policy_version"] == 3
    assert page["forage_rollout_policy_epoch"] == 2
    assert page["forage_rollout_policy_announced_version"] == 5
    assert page["forage_rollout_prompts_on_stream"] == 6


def test_the_policy_version_of_each_engine_is_shown(collector: RolloutCollector) -> None:
    serving = [Snapshot(name, {}, Policy(version=version)) for name, version in (("a", 3), ("b", 4))]
    collector.update({"Engine": [*serving, Snapshot("starting", {})]}, None, None)
    page = read_page(collector)
    assert {name: value for name, value in page.items() if "replica_policy" in name} == {
        'forage_rollout_replica_policy_version{replica="a"}': 3,
        'forage_rollout_replica_policy_version{replica="b"}': 4,
    }


def test_a_counter_keeps_its_value_when_a_replica_is_started_again(collector: RolloutCollector) -> None:
    turns = ("turns",)
    for counts in (
        build_engines(a={turns: 10.0}, b={turns: 4.0}),
        build_engines(b={turns: 5.0}),
        build_engines(b={turns: 5.0}, c={turns: 3.0}),
        build_engines(b={turns: 6.0}, c={turns: 3.0}),
    ):
        collector.update(counts, None, None)
    assert read_page(collector)["forage_rollout_turns_total"] == 10 + 6 + 3


def test_labels_are_kept(collector: RolloutCollector) -> None:
    retries = ("call_retries", "reward")
    collector.update(build_engines(a={retries: 1.0, ("call_retries", "retriever"): 2.0}), None, None)
    collector.update(build_engines(a={retries: 4.0}), None, None)
    page = read_page(collector)
    assert page['forage_rollout_call_retries_total{service="reward"}'] == 4
    assert page['forage_rollout_call_retries_total{service="retriever"}'] == 2
    assert collector.get("call_retries", "reward") == 4


def test_staleness_counts_each_token_once_at_the_snapshot_after_it_was_sampled(collector: RolloutCollector) -> None:
    tokens = VersionTokens()

    def take_snapshot(announced: int) -> None:
        snapshot = Snapshot("a", {}, version_tokens=tokens.counts)
        collector.update({"Agent": [snapshot]}, None, Policy(version=announced, epoch=1))

    def sample(version: int, count: int) -> None:
        segment = PolicySegment(version=version, epoch=1, begin=2, end=2 + count)
        tokens.add_group(TrajectoryGroup(trajectories=[Trajectory(segments=[segment])]))

    sample(4, 10)
    take_snapshot(4)
    sample(4, 5)
    take_snapshot(7)
    take_snapshot(7)
    page = read_page(collector)
    assert page['forage_rollout_token_staleness_bucket{le="0.0"}'] == 10
    assert page['forage_rollout_token_staleness_bucket{le="2.0"}'] == 10
    assert page['forage_rollout_token_staleness_bucket{le="3.0"}'] == 15
    assert page["forage_rollout_token_staleness_count"] == 15
    assert page["forage_rollout_token_staleness_sum"] == 15


def test_only_the_latest_versions_are_kept() -> None:
    tokens = VersionTokens()
    for version in range(100):
        segment = PolicySegment(version=version, epoch=1, begin=0, end=1)
        tokens.add_group(TrajectoryGroup(trajectories=[Trajectory(segments=[segment])]))
    assert len(tokens.counts) == 32
    assert (1, 99) in tokens.counts


def test_tokens_of_a_lower_epoch_that_came_later_are_kept() -> None:
    tokens = VersionTokens()
    for epoch, version in [*((3, version) for version in range(40)), (1, 18), (1, 18)]:
        segment = PolicySegment(version=version, epoch=epoch, begin=0, end=5)
        tokens.add_group(TrajectoryGroup(trajectories=[Trajectory(segments=[segment])]))
    assert tokens.counts[1, 18] == 10


def test_an_open_circuit_is_counted_until_it_closes() -> None:
    now = [0.0]
    circuit = Circuit("oracle", "host:1", failures=2, open_s=1.0, clock=lambda: now[0])
    key = ("circuit_open", "oracle")
    assert read_call_counts()[key] == 0
    for _ in range(2):
        with pytest.raises(TimeoutError), circuit.attempt():
            raise TimeoutError
    assert read_call_counts()[key] == 1
    with pytest.raises(CircuitOpenError), circuit.attempt():
        raise AssertionError("not reached")
    now[0] = 2.0
    with pytest.raises(TimeoutError), circuit.attempt():  # the probe fails: still one circuit, still open
        raise TimeoutError
    assert read_call_counts()[key] == 1
    now[0] = 4.0
    with circuit.attempt():
        pass
    assert read_call_counts()[key] == 0
    assert read_call_counts()["circuits_opened", "oracle"] == 2
