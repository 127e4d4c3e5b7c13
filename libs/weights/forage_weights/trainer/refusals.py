"""Engines that refuse the announced policy: said once, counted, and shown until they serve it or a later one."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from forage_queue.streams.client import LIVELY_S, StreamClient
from forage_runtime.retries import RedisRetry
from forage_runtime.telemetry.health import Health
from forage_runtime.telemetry.logs import get_logger

REFUSALS = Counter("forage_trainer_policy_refusals_total", "Published policies that an engine refused to load")
REFUSING = Gauge("forage_trainer_engines_refusing", "Engines that refuse the announced policy now")
_WHAT_TO_DO = (
    "they serve the policy before, and prompts that ask for this one wait; it is published again whole, once: if that "
    "does not help, see that every engine can read the named file and serves this model"
)


class Refusals:
    """What the engines say about the policies that are announced.

    The trainer goes on: an engine that refuses serves the policy before for as long as prompts allow it.

    Attributes:
        canary_diff: by how much the engine that is furthest off differs from the trainer's log-probabilities of a
            canary (`Policy.canary`), in nats; None where no engine has compared.
    """

    def __init__(self, streams: StreamClient, retry: RedisRetry, health: Health) -> None:
        self._streams = streams
        self._retry = retry
        self._health = health
        self._known: set[tuple[str, bytes]] = set()
        self._by_all: tuple[int, int] | None = None
        self._repeated: tuple[int, int] | None = None
        self.canary_diff: float | None = None

    def check(self) -> None:
        """Log and count what is new, and note on the health endpoint what lasts."""
        announced = self._retry(self._streams.read_policy)
        replicas = self._retry(lambda: self._streams.read_replicas(LIVELY_S))
        compared = [one.difference for one in replicas.values() if one.HasField("difference")]
        self.canary_diff = max(compared, default=None)
        refusing = {
            name: one.reason for name, one in replicas.items() if one.HasField("refused") and one.refused == announced
        }
        REFUSING.set(len(refusing))
        self._by_all = None
        if announced is None or not refusing:
            self._health.set_notes({})
            return
        version, policy = announced.version, announced.SerializeToString()
        for name in sorted(refusing.keys() - {known for known, other in self._known if other == policy}):
            REFUSALS.inc()
            get_logger().warning("policy_refused_by_engine", version=version, replica=name, reason=refusing[name])
        self._known = {(name, policy) for name in refusing} | {one for one in self._known if one[1] == policy}
        reason = refusing[min(refusing)]
        if len(refusing) < len(replicas):
            note = f"{len(refusing)} of {len(replicas)} engines refuse policy version {version}: {reason}"
        else:
            note = f"all engines ({len(replicas)}) refuse policy version {version}: {reason}: {_WHAT_TO_DO}"
            self._by_all = announced.epoch, version
        self._health.set_notes({"policy": note})

    def is_to_be_published_again(self) -> bool:
        """Whether all engines refuse the announced policy; True once for each version."""
        self.check()
        if self._by_all is None or self._by_all == self._repeated:
            return False
        self._repeated = self._by_all
        get_logger().error("policy_refused_by_all", detail=self._health.notes["policy"])
        return True
