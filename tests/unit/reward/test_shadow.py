"""The comparison of shadow and live scores, and the sampling of log lines."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

from forage_proto.v1 import trajectory_pb2
from forage_reward.serve.shadow import record_comparison
from forage_runtime.telemetry.log_sampling import LogSampler

OK, ABSTAIN, INTERNAL = trajectory_pb2.STATUS_OK, trajectory_pb2.STATUS_ABSTAIN, trajectory_pb2.STATUS_INTERNAL


def read_metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"forage_reward_shadow_{name}", labels) or 0.0


@pytest.mark.parametrize(
    ("live", "shadow", "difference", "kind"),
    [
        ((OK, 1.0), (OK, 1.0), 0.0, None),
        ((OK, 1.0), (OK, 0.25), -0.75, "total"),
        ((OK, 0.5), (ABSTAIN, 0.0), -0.5, "status"),
        ((OK, 0.5), (INTERNAL, 0.0), None, "status"),
        ((INTERNAL, 0.0), (INTERNAL, 0.0), None, None),
    ],
)
def test_a_difference_is_observed_only_between_values(
    live: tuple[int, float],
    shadow: tuple[int, float],
    difference: float | None,
    kind: str | None,
    request: pytest.FixtureRequest,
) -> None:
    source = request.node.name
    scores = [trajectory_pb2.Score(status=status, total=total) for status, total in (live, shadow)]
    record_comparison(source, "t", scores[0], scores[1], LogSampler(per_minute=1))
    for bound in (-0.5, -0.1, 1e-9, 1.0):
        within = difference is not None and difference <= bound
        assert read_metric("difference_bucket", data_source=source, le=str(bound)) == float(within)
    for each in ("total", "status"):
        assert read_metric("disagreements_total", data_source=source, kind=each) == float(kind == each)


def test_a_sampler_admits_the_first_events_of_each_kind_per_minute() -> None:
    now = 0.0
    sampler = LogSampler(per_minute=2, clock=lambda: now)
    assert [sampler.admit("a") for _ in range(4)] == [True, True, False, False]
    assert sampler.admit("b")
    now = 59.0
    assert not sampler.admit("a")
    now = 60.0
    assert [sampler.admit("a") for _ in range(3)] == [True, True, False]
