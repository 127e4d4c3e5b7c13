"""Shadow rewards: a second reward scores the same live traffic in a process of its own, at low priority.

What it says goes into metrics and sampled log lines, never into a reply. When it cannot keep up, trajectories are
dropped and counted.
"""

from __future__ import annotations

import queue
import threading
import time

from prometheus_client import Counter, Histogram

from forage_common.settings import Settings
from forage_common.telemetry.logs import get_logger
from forage_common.v1 import reward_pb2, trajectory_pb2
from forage_reward.isolation.child import START_TIMEOUT_S, Child, ChildDiedError, ChildTimeoutError
from forage_reward.serve.sampling import Sampler

SCORED = Counter("forage_reward_shadow_items_total", "Shadow scores by outcome", ["data_source", "status"])
DROPPED = Counter("forage_reward_shadow_dropped_total", "Trajectories the shadow had no room for", ["data_source"])
DISAGREED = Counter("forage_reward_shadow_disagreements_total", "Shadow scores that differ", ["data_source", "kind"])
RESTARTS = Counter("forage_reward_shadow_restarts_total", "Shadow processes started again")
DIFFERENCE = Histogram(
    "forage_reward_shadow_difference",
    "Shadow total minus live total",
    ["data_source"],
    buckets=(-1.0, -0.5, -0.2, -0.1, -0.01, -1e-9, 1e-9, 0.01, 0.1, 0.2, 0.5, 1.0),
)
TOLERANCE = 1e-9
_CALL_TIMEOUT_S = 60.0
_RESTART_WAIT_S = 1.0
_VALUES = (trajectory_pb2.STATUS_OK, trajectory_pb2.STATUS_ABSTAIN)


class Shadow:
    """The shadow of a running service; without shadow routes it takes nothing and starts nothing.

    Raises:
        ChildDiedError, ChildTimeoutError: its process did not start.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._sources = frozenset(settings.reward.shadow)
        self._waiting: queue.Queue[tuple[bytes, str, trajectory_pb2.Score]] = queue.Queue(settings.reward.shadow_queue)
        self._sampler = Sampler(per_minute=6)
        self._stopped = threading.Event()
        if self._sources:
            self._child = self._start()
            threading.Thread(target=self._run, name="shadow", daemon=True).start()

    def offer(self, item: reward_pb2.ScoreItem, live: trajectory_pb2.Score) -> None:
        """Have an item scored later, if its data source has a shadow and there is room. Never waits."""
        if item.data_source not in self._sources:
            return
        if self._waiting.full():
            DROPPED.labels(item.data_source).inc()
            return
        try:
            self._waiting.put_nowait((item.SerializeToString(), item.trajectory_id, live))
        except queue.Full:
            DROPPED.labels(item.data_source).inc()

    def close(self) -> None:
        """End its process; what waits is not scored."""
        self._stopped.set()
        if self._sources:
            self._child.kill()

    def _start(self) -> Child:
        child = Child("forage_reward.serve.shadow_process")
        try:
            child.call(self._settings.to_yaml().encode(), START_TIMEOUT_S)
        except (ChildDiedError, ChildTimeoutError):
            child.kill()
            raise
        return child

    def _run(self) -> None:
        while not self._stopped.is_set():
            frame, trajectory, live = self._waiting.get()
            try:
                scored = reward_pb2.ScoredItem.FromString(self._child.call(frame, _CALL_TIMEOUT_S))
            except (ChildDiedError, ChildTimeoutError) as error:
                if not self._stopped.is_set():
                    self._restart(error)
                continue
            compare(reward_pb2.ScoreItem.FromString(frame).data_source, trajectory, live, scored.score, self._sampler)

    def _restart(self, why: Exception) -> None:
        RESTARTS.inc()
        get_logger().warning("shadow_restarted", why=str(why))
        self._child.kill()
        while not self._stopped.is_set():
            try:
                self._child = self._start()
                break
            except (ChildDiedError, ChildTimeoutError) as error:
                get_logger().error("shadow_cannot_start", error=str(error), retry_s=_RESTART_WAIT_S)
                time.sleep(_RESTART_WAIT_S)
        if self._stopped.is_set():  # `close` may have come between
            self._child.kill()


def compare(
    source: str, trajectory: str, live: trajectory_pb2.Score, shadow: trajectory_pb2.Score, sampler: Sampler
) -> None:
    """Count what the shadow said, and how far it is from the live score; log some of the disagreements."""
    both = live.status in _VALUES and shadow.status in _VALUES
    if both:
        DIFFERENCE.labels(source).observe(shadow.total - live.total)
    agreed = live.status == shadow.status and (not both or abs(shadow.total - live.total) <= TOLERANCE)
    if not agreed:
        DISAGREED.labels(source, "total" if live.status == shadow.status else "status").inc()
    SCORED.labels(source, trajectory_pb2.Status.Name(shadow.status).removeprefix("STATUS_").lower()).inc()
    if not agreed and sampler.take(source):
        get_logger().info(
            "shadow_disagrees",
            trajectory=trajectory,
            data_source=source,
            live={"reward": live.reward, "status": live.status, "total": live.total, "detail": live.detail},
            shadow={"reward": shadow.reward, "status": shadow.status, "total": shadow.total, "detail": shadow.detail},
        )
