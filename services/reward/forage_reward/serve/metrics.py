"""What Prometheus is told of every scored trajectory: totals, components and statuses by reward and data source."""

from __future__ import annotations

import re
import threading
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

from prometheus_client import Counter, Gauge, Histogram

from forage_common.v1 import trajectory_pb2

REQUESTS = Counter("forage_reward_requests_total", "Calls of a method, refused ones included", ["method"])
REFUSED = Counter("forage_reward_refused_total", "Calls refused because the queue was full", ["method"])
for _method in ("Score", "ScoreStream"):
    REFUSED.labels(_method)  # shown from the start, as 0
SECONDS = Histogram("forage_reward_request_seconds", "Time to score the batch of a call of Score")
QUEUE = Gauge("forage_reward_queue_items", "Trajectories in hand", multiprocess_mode="livesum")
STATUSES = Counter(
    "forage_reward_items_total",
    "Trajectories scored, by outcome; timeout and internal are failures of ours, not of the policy",
    ["reward", "data_source", "status"],
)


class _Histogram(Histogram):
    def observe_times(self, amount: float, times: int) -> None:
        """`observe(amount)`, so many times."""
        self._sum.inc(amount * times)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(times)


VALUES = _Histogram(
    "forage_reward_score",
    "Raw values by component; the component `total` is the reward itself",
    ["reward", "data_source", "component"],
    buckets=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 2.0),
)
MAX_SERIES = 512
"""Of components over all rewards: their names may come from user code. The rest is `other`."""

_TURN = re.compile(r"turn_\d+$")
_STATUS_NAMES: dict[int, str] = {
    int(value): name.removeprefix("STATUS_").lower() for name, value in trajectory_pb2.Status.items()
}
_SCORED = (trajectory_pb2.STATUS_OK, trajectory_pb2.STATUS_ABSTAIN)
_components: dict[tuple[str, str, str], _Histogram] = {}
_lock = threading.Lock()


@dataclass
class _Counted:
    score: trajectory_pb2.Score
    times: int = 0


class Tally:
    """Counts the scores of a batch and tells Prometheus at once: most of a batch shares one of few messages."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], _Counted] = {}

    def add(self, data_source: str, score: trajectory_pb2.Score) -> None:
        """Count a score. `data_source` must be a routed one, or "": it becomes a label."""
        # By identity, which is cheap; the message is kept, so that no other takes its place.
        key = (data_source, id(score))
        counted = self._found.get(key)
        if counted is None:
            counted = self._found[key] = _Counted(score)
        counted.times += 1

    def tell(self) -> None:
        """Prometheus knows afterwards."""
        for (data_source, _), counted in self._found.items():
            score, times = counted.score, counted.times
            reward = score.reward
            _status(reward, data_source, score.status).inc(times)
            if score.status in _SCORED:
                _component(reward, data_source, "total").observe_times(score.total, times)
                for part in score.components:
                    _component(reward, data_source, part.name).observe_times(part.raw, times)
        self._found.clear()


@lru_cache(maxsize=4096)
def _status(reward: str, data_source: str, status: int) -> Counter:
    return STATUSES.labels(reward, data_source, _STATUS_NAMES.get(status, "unknown"))


def _component(reward: str, data_source: str, component: str) -> _Histogram:
    key = (reward, data_source, component)
    found = _components.get(key)
    if found is None:
        name = _TURN.sub("turn", component)
        with _lock:
            if len(_components) >= MAX_SERIES:
                return VALUES.labels(reward, data_source, "other")
            found = _components[key] = VALUES.labels(reward, data_source, name)
    return found
