"""Prometheus metrics of scored trajectories: totals, components and statuses by reward and data source."""

from __future__ import annotations

import re
import threading
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

from prometheus_client import Counter, Gauge, Histogram

from forage_proto.v1 import trajectory_pb2
from forage_reward.wire import format_status

REQUESTS = Counter("forage_reward_requests_total", "Calls of a method, including refused ones", ["method"])
REFUSED = Counter("forage_reward_refused_total", "Calls refused because the queue was full", ["method"])
for _method in ("Score", "ScoreStream"):
    REFUSED.labels(_method)  # so that a scrape shows 0 before the first event
SECONDS = Histogram("forage_reward_request_seconds", "Time to score the batch of a call of Score")
QUEUE = Gauge("forage_reward_queue_items", "Trajectories queued or being scored", multiprocess_mode="livesum")
STATUSES = Counter(
    "forage_reward_items_total",
    "Trajectories scored, by status; timeout and internal are failures of the system, not of the policy",
    ["reward", "data_source", "status"],
)


class _Histogram(Histogram):
    def observe_times(self, amount: float, times: int) -> None:
        """Observe the same amount several times."""
        self._sum.inc(amount * times)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(times)


VALUES = _Histogram(
    "forage_reward_score",
    "Raw values by component; the component `total` is the reward itself",
    ["reward", "data_source", "component"],
    buckets=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 2.0),
)
MAX_SERIES = 512
"""Component series over all rewards, because user code chooses component names. Further ones are `other`."""

_TURN = re.compile(r"turn_\d+$")
_WITH_VALUE = (trajectory_pb2.STATUS_OK, trajectory_pb2.STATUS_ABSTAIN)
_components: dict[tuple[str, str, str], _Histogram] = {}
_lock = threading.Lock()


@dataclass
class _Count:
    score: trajectory_pb2.Score
    times: int = 0


class ScoreTally:
    """Counts the scores of a batch and updates the metrics once: most of a batch shares few distinct messages."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], _Count] = {}

    def add_score(self, data_source: str, score: trajectory_pb2.Score) -> None:
        """Count a score. `data_source` becomes a label, so it must have a route or be ""."""
        # By identity, which is cheaper than equality; the entry keeps the message, so its id stays unique.
        key = (data_source, id(score))
        count = self._counts.get(key)
        if count is None:
            count = self._counts[key] = _Count(score)
        count.times += 1

    def flush(self) -> None:
        """Add the counts to the metrics and reset them."""
        for (data_source, _), count in self._counts.items():
            score, times = count.score, count.times
            reward = score.reward
            _get_status_counter(reward, data_source, score.status).inc(times)
            if score.status in _WITH_VALUE:
                _get_component_histogram(reward, data_source, "total").observe_times(score.total, times)
                for part in score.components:
                    _get_component_histogram(reward, data_source, part.name).observe_times(part.raw, times)
        self._counts.clear()


@lru_cache(maxsize=4096)
def _get_status_counter(reward: str, data_source: str, status: trajectory_pb2.Status.ValueType) -> Counter:
    return STATUSES.labels(reward, data_source, format_status(status))


def _get_component_histogram(reward: str, data_source: str, component: str) -> _Histogram:
    key = (reward, data_source, component)
    histogram = _components.get(key)
    if histogram is None:
        name = _TURN.sub("turn", component)
        with _lock:
            if len(_components) >= MAX_SERIES:
                return VALUES.labels(reward, data_source, "other")
            histogram = _components[key] = VALUES.labels(reward, data_source, name)
    return histogram
