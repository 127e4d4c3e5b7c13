"""Groups from the trajectories stream, handed out as whole batches in the order of their positions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import Counter

from forage_common.errors import ForageError
from forage_common.streams import Entry, StreamClient
from forage_common.telemetry import Health, get_logger
from forage_common.v1.trajectory_pb2 import TrajectoryGroup
from forage_trainer.waiting import Insist, Stop

CONSUMER = "trainer"
_TAKE = 64
_RECLAIM = 100_000
_BLOCK_S = 1.0
_RECLAIM_EVERY_S = 10.0
_SAY_EVERY_S = 10.0
DROPPED = Counter("forage_trainer_groups_dropped_total", "Groups that are not trained on", ["reason"])


class BatchTimeoutError(ForageError):
    """A batch did not become complete in time."""


@dataclass(frozen=True)
class Batch:
    """All groups of one batch, by position. stale: groups of it that were dropped and issued again."""

    number: int
    entries: tuple[Entry[TrajectoryGroup], ...]
    stale: int

    @property
    def ids(self) -> list[bytes]:
        return [entry.id for entry in self.entries]

    @property
    def groups(self) -> list[TrajectoryGroup]:
        return [entry.message for entry in self.entries]


def oldest_version(group: TrajectoryGroup) -> int | None:
    """The lowest policy version of any token; None for a group without tokens."""
    return min((s.version for t in group.trajectories for s in t.segments), default=None)


class Batcher:
    """Holds groups until their batch is complete. At most (max_staleness + 1) batches are in memory."""

    def __init__(
        self,
        streams: StreamClient,
        batch_size: int,
        max_staleness: int,
        reissue: Callable[[int, int, int], None],
        insist: Insist,
        stop: Stop,
        health: Health,
    ) -> None:
        """
        Args:
            reissue: (batch, position, attempt) → puts that prompt on the stream.
        """
        self._streams = streams
        self._size = batch_size
        self._max_staleness = max_staleness
        self._reissue = reissue
        self._insist = insist
        self._stop = stop
        self._health = health
        self._held: dict[int, dict[int, Entry[TrajectoryGroup]]] = {}
        self._consumed = 0
        self._stale: dict[int, int] = {}

    def start(self, consumed: int) -> int:
        """Forget batches up to `consumed`, and take over what an earlier life had taken. Returns groups held."""
        self._consumed = consumed
        self._held = {number: held for number, held in self._held.items() if number > consumed}
        self._reclaim()
        return sum(len(held) for held in self._held.values())

    def next(self, number: int, timeout_s: float) -> Batch:
        """Batch `number`, complete.

        Raises:
            BatchTimeoutError: nothing arrived for `timeout_s` while groups were missing.
            Stopped: the process was asked to stop.
        """
        began = arrived = said = reclaimed = time.monotonic()
        self._drop_stale(number)
        while len(self._held.get(number, {})) < self._size:
            missing = self._missing(number)
            self._health.wait_for("batch", f"batch {number}: {len(missing)} of {self._size} groups missing")
            now = time.monotonic()
            if now - arrived > timeout_s:
                raise BatchTimeoutError(
                    f"batch {number} lacks {len(missing)} of {self._size} groups after {now - began:.0f} s "
                    f"(positions {_short(missing)}): is a rollout service running for this run?"
                )
            if now - said > _SAY_EVERY_S:
                said = now
                get_logger().info(
                    "waiting_for_batch",
                    batch=number,
                    have=self._size - len(missing),
                    want=self._size,
                    missing=_short(missing),
                    waited_s=round(now - began),
                )
            if self._take():
                arrived = time.monotonic()
            elif now - max(arrived, reclaimed) > _RECLAIM_EVERY_S:
                # A reply that got lost on its way leaves groups that are ours and that nobody would deliver again.
                reclaimed = now
                if self._reclaim():
                    arrived = time.monotonic()
            self._drop_stale(number)
        self._health.have("batch")
        held = self._held[number]
        return Batch(number, tuple(held[p] for p in range(self._size)), self._stale.get(number, 0))

    def done(self, number: int) -> None:
        """The batch was trained on: later copies of its groups are duplicates."""
        self._held.pop(number, None)
        self._stale.pop(number, None)
        self._consumed = max(self._consumed, number)

    def _missing(self, number: int) -> list[int]:
        held = self._held.get(number, {})
        return [p for p in range(self._size) if p not in held]

    def _take(self) -> int:
        stream = self._streams.trajectories
        return self._accept(self._insist(lambda: self._streams.take_groups(stream, CONSUMER, _TAKE, _BLOCK_S)))

    def _reclaim(self) -> int:
        stream = self._streams.trajectories
        return self._accept(self._insist(lambda: self._streams.reclaim_groups(stream, CONSUMER, _RECLAIM)))

    def _accept(self, entries: list[Entry[TrajectoryGroup]]) -> int:
        """Keep what is new; discard what is not. Returns how many were new."""
        new = 0
        for entry in entries:
            group = entry.message
            held = self._held.setdefault(group.batch, {}) if group.batch > self._consumed else None
            if held is None or group.position >= self._size:
                self._discard(entry, "duplicate")
            elif group.position not in held:
                held[group.position] = entry
                new += 1
            elif held[group.position].id != entry.id:
                self._discard(entry, "duplicate")
        return new

    def _drop_stale(self, number: int) -> None:
        """Of batch `number`, about to be trained on by version `number - 1`, drop groups beyond the bound."""
        bound = number - 1 - self._max_staleness
        held = self._held.get(number, {})
        for position, entry in sorted(held.items()):
            version = oldest_version(entry.message)
            if version is None or version >= bound:
                continue
            # First the new prompt, then the old group: a crash in between repeats both, and loses nothing.
            self._reissue(number, position, entry.message.attempt + 1)
            del held[position]
            self._stale[number] = self._stale.get(number, 0) + 1
            self._discard(entry, "stale")

    def _discard(self, entry: Entry[TrajectoryGroup], reason: str) -> None:
        self._insist(lambda: self._streams.discard(self._streams.trajectories, [entry.id]))
        DROPPED.labels(reason).inc()
        group = entry.message
        get_logger().info(
            "group_dropped",
            reason=reason,
            group=group.group_uid,
            batch=group.batch,
            position=group.position,
            attempt=group.attempt,
        )


def _short(positions: list[int]) -> str:
    shown = ", ".join(str(p) for p in positions[:8])
    return shown + (f" and {len(positions) - 8} more" if len(positions) > 8 else "")
