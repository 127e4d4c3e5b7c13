"""Shadow rewards: a second reward scores the same live traffic in a separate process, at low priority.

Its scores go to metrics and sampled log lines, never to a reply. When it cannot keep up, trajectories are dropped and
counted.
"""

from __future__ import annotations

import queue
import threading
import time

from prometheus_client import Counter, Histogram

from forage_proto.v1 import reward_pb2, trajectory_pb2
from forage_reward.wire import format_status
from forage_runtime.errors import UserError
from forage_runtime.settings import Settings
from forage_runtime.telemetry.log_sampling import LogSampler
from forage_runtime.telemetry.logs import get_logger
from forage_sandbox.child import Child, ChildError

SCORED = Counter("forage_reward_shadow_items_total", "Shadow scores by status", ["data_source", "status"])
DROPPED = Counter("forage_reward_shadow_dropped_total", "Trajectories dropped by a full shadow queue", ["data_source"])
DISAGREED = Counter("forage_reward_shadow_disagreements_total", "Shadow scores that differ", ["data_source", "kind"])
RESTARTS = Counter("forage_reward_shadow_restarts_total", "Restarts of the shadow process")
DIFFERENCE = Histogram(
    "forage_reward_shadow_difference",
    "Shadow total minus live total",
    ["data_source"],
    buckets=(-1.0, -0.5, -0.2, -0.1, -0.01, -1e-9, 1e-9, 0.01, 0.1, 0.2, 0.5, 1.0),
)
TOLERANCE = 1e-9
MOST_WAITING = 1024
"""Most trajectories that wait for their shadow reward: a few batches, in some ten megabytes."""

_CALL_TIMEOUT_S = 60.0
_RESTART_DELAY_S = 1.0
_WITH_VALUE = (trajectory_pb2.STATUS_OK, trajectory_pb2.STATUS_ABSTAIN)


class ShadowScorer:
    """The shadow of a running service; without shadow routes it accepts no items and starts no process.

    Raises:
        ChildError, UserError: its process did not start.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._sources = frozenset(settings.reward.shadow)
        self._waiting: queue.Queue[tuple[bytes, str, trajectory_pb2.Score]] = queue.Queue(MOST_WAITING)
        self._sampler = LogSampler(per_minute=6)
        self._stopped = threading.Event()
        if self._sources:
            self._child = self._start()
            threading.Thread(target=self._run, name="shadow", daemon=True).start()

    def offer(self, item: reward_pb2.ScoreItem, live: trajectory_pb2.Score) -> None:
        """Queue an item, if its data source has a shadow and the queue has room. Never blocks."""
        if item.data_source not in self._sources:
            return
        try:
            if self._waiting.full():  # a full queue must not cost the time to serialise the item
                raise queue.Full
            self._waiting.put_nowait((item.SerializeToString(), item.trajectory_id, live))
        except queue.Full:
            DROPPED.labels(item.data_source).inc()

    def close(self) -> None:
        """Kill its process; queued items are not scored."""
        self._stopped.set()
        if self._sources:
            self._child.kill()

    def _start(self) -> Child:
        first_frame = self._settings.to_yaml().encode()
        return Child("forage_reward.serve.shadow_process", first_frame=first_frame).wait_until_ready()

    def _run(self) -> None:
        while not self._stopped.is_set():
            frame, trajectory, live = self._waiting.get()
            try:
                reply = reward_pb2.ScoredItem.FromString(self._child.call(frame, _CALL_TIMEOUT_S))
            except ChildError as error:
                if not self._stopped.is_set():
                    self._restart(error)
                continue
            source = reward_pb2.ScoreItem.FromString(frame).data_source
            record_comparison(source, trajectory, live, reply.score, self._sampler)

    def _restart(self, cause: ChildError) -> None:
        RESTARTS.inc()
        get_logger().warning("shadow_restarted", why=str(cause))
        self._child.kill()
        while not self._stopped.is_set():
            try:
                self._child = self._start()
                break
            except (ChildError, UserError) as error:
                get_logger().error("shadow_cannot_start", error=str(error), retry_s=_RESTART_DELAY_S)
                time.sleep(_RESTART_DELAY_S)  # wait: pause before a restart
        if self._stopped.is_set():  # `close` may have killed the previous child only
            self._child.kill()


def record_comparison(
    source: str, trajectory: str, live: trajectory_pb2.Score, shadow: trajectory_pb2.Score, sampler: LogSampler
) -> None:
    """Count a shadow score and its difference from the live score; log a sample of the disagreements."""
    has_both = live.status in _WITH_VALUE and shadow.status in _WITH_VALUE
    if has_both:
        DIFFERENCE.labels(source).observe(shadow.total - live.total)
    agrees = live.status == shadow.status and (not has_both or abs(shadow.total - live.total) <= TOLERANCE)
    if not agrees:
        DISAGREED.labels(source, "total" if live.status == shadow.status else "status").inc()
    SCORED.labels(source, format_status(shadow.status)).inc()
    if not agrees and sampler.admit(source):
        get_logger().info(
            "shadow_disagrees",
            trajectory=trajectory,
            data_source=source,
            live={"reward": live.reward, "status": live.status, "total": live.total, "detail": live.detail},
            shadow={"reward": shadow.reward, "status": shadow.status, "total": shadow.total, "detail": shadow.detail},
        )
