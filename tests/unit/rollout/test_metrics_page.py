"""docs/reference/metrics.md and the metrics of the rollout."""

from __future__ import annotations

import dataclasses

from metrics_page import assert_current, collect_metrics

from forage_queue.rollout.dispatcher import DispatchCounts
from forage_rollout.agent import AgentCounts
from forage_rollout.engine.engine_counts import EngineCounts
from forage_rollout.metrics import read_call_counts


def test_the_reference_page_of_metrics_is_current() -> None:
    assert_current("rollout")


def test_every_count_of_a_replica_is_described() -> None:
    counts = [field.name for kind in (AgentCounts, DispatchCounts, EngineCounts) for field in dataclasses.fields(kind)]
    counts += [name for name, _ in read_call_counts()]
    described = {metric.name.removesuffix("_total") for metric in collect_metrics("rollout")}
    assert {f"forage_rollout_{name}" for name in counts} <= described
