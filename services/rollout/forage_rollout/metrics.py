"""Prometheus metrics of the whole service, from the counts that its processes report."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forage_common.v1.trajectory_pb2 import Policy

_PREFIX = "forage_rollout_"
_GAUGES = {
    "groups_in_flight": "Prompts being worked on",
    "samples_in_flight": "Trajectories being worked on",
    "requests_in_flight": "Generations waiting or running in the engine",
}


class SnapshotCollector(Collector):
    """Shows the counts of the last snapshot; those that only grow are counters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}
        self._serving = Policy()

    def update(self, counts: Mapping[str, float], serving: Policy) -> None:
        """Replace what is shown."""
        with self._lock:
            self._counts = dict(counts)
            self._serving = serving

    def get(self, name: str) -> int:
        """One count of the last snapshot; 0 before there is any."""
        with self._lock:
            return int(self._counts.get(name, 0))

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            counts, serving = self._counts, self._serving
        for name, value in counts.items():
            if name in _GAUGES:
                yield GaugeMetricFamily(_PREFIX + name, _GAUGES[name], value)
            else:
                yield CounterMetricFamily(_PREFIX + name, name.replace("_", " ").capitalize(), value)
        yield GaugeMetricFamily(_PREFIX + "policy_version", "Policy version that is served", serving.version)
        yield GaugeMetricFamily(_PREFIX + "policy_epoch", "Epoch of the policy that is served", serving.epoch)
