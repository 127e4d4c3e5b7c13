"""Groups from the trajectories stream, handed out as whole batches in the order of their positions."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from prometheus_client import Counter

from forage_common.errors import ForageError
from forage_common.settings import PartialGroups, TrainerSettings
from forage_common.streams.client import Entry, StreamClient
from forage_common.telemetry.health import Health
from forage_common.telemetry.logs import get_logger
from forage_common.v1.trajectory_pb2 import TrajectoryGroup
from forage_trainer.data import spans
from forage_trainer.data.dataset import refill_of
from forage_trainer.data.feeder import Feeder
from forage_trainer.waiting import Insist, Stop, Stopped

CONSUMER = "trainer"
_TAKE = 64
_RECLAIM = 100_000
_BLOCK_S = 1.0
_AHEAD_EVERY_S = 0.05
_RECLAIM_EVERY_S = 10.0
_SAY_EVERY_S = 10.0
WAITED = Counter("forage_trainer_wait_seconds_total", "Time that the trainer has waited for groups; grows as it waits")
DROPPED = Counter("forage_trainer_groups_dropped_total", "Groups that are not trained on", ["reason"])
for _reason in ("stale", "duplicate", "equal", "straggler"):
    DROPPED.labels(_reason)  # shown from the start, as 0


class BatchTimeoutError(ForageError):
    """A batch did not become complete in time."""


@dataclass(frozen=True)
class Batch:
    """The groups of one batch, by position.

    stale: groups of it that were dropped and issued again.
    stragglers: positions that it does without, because they did not come in time.
    """

    number: int
    entries: tuple[Entry[TrajectoryGroup], ...]
    stale: int
    stragglers: tuple[int, ...] = ()

    @property
    def ids(self) -> list[bytes]:
        return [entry.id for entry in self.entries]

    @property
    def groups(self) -> list[TrajectoryGroup]:
        return [entry.message for entry in self.entries]

    @property
    def figures(self) -> dict[str, int]:
        """What became of groups on the way here. refilled_groups: of equal rewards, and replaced."""
        return {
            "dropped_stale": self.stale,
            "dropped_stragglers": len(self.stragglers),
            "refilled_groups": sum(refill_of(group.group_uid) for group in self.groups),
        }


def oldest_version(group: TrajectoryGroup) -> int | None:
    """The lowest policy version of any token; None for a group without tokens."""
    return min((s.version for t in group.trajectories for s in t.segments), default=None)


class Batcher:
    """Holds groups until their batch is complete. At most (max_staleness + 1) batches are in memory."""

    def __init__(
        self,
        streams: StreamClient,
        batch_size: int,
        settings: TrainerSettings,
        feeder: Feeder,
        insist: Insist,
        stop: Stop,
        health: Health,
    ) -> None:
        """
        Args:
            feeder: issues groups again that are too old, and others for those that teach nothing.
        """
        self._streams = streams
        self._size = batch_size
        self._settings = settings
        self._feeder = feeder
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
        """Batch `number`, complete but for stragglers that the settings say to drop.

        Raises:
            BatchTimeoutError: nothing arrived for `timeout_s` while groups were missing.
            Stopped: the process was asked to stop.
        """
        began = arrived = said = reclaimed = counted = time.monotonic()
        first: float | None = None
        waits = True
        self._drop_stale(number)
        while missing := self._missing(number):
            self._health.wait_for("batch", f"batch {number}: {len(missing)} of {self._size} groups missing")
            now = time.monotonic()
            WAITED.inc(now - counted)
            counted = now
            first = (first or now) if len(missing) < self._size else None
            if waits and first is not None and 0 < self._settings.straggler_timeout_s < now - first:
                waits = False
                self._say_stragglers(number, missing, now - first)
                if self._settings.partial_groups is PartialGroups.DROP:
                    break
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
        WAITED.inc(time.monotonic() - counted)
        self._health.mark_ready("batch")
        held = self._held[number]
        return Batch(number, tuple(held[p] for p in sorted(held)), self._stale.get(number, 0), tuple(missing))

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Assemble the batches to come while the body computes, on a thread; the body must not use the batcher.

        Groups of equal rewards are so replaced at once. Whether a group is too old is judged when its own step begins.
        """
        if self._settings.max_staleness == 0:  # there are no prompts out
            yield
            return
        over = threading.Event()
        with ThreadPoolExecutor(1, "ahead") as pool:
            taking = pool.submit(self._take_until, over)
            try:
                yield
            finally:
                over.set()
            taking.result()

    def done(self, number: int) -> None:
        """The batch was trained on: later copies of its groups are duplicates."""
        self._held.pop(number, None)
        self._stale.pop(number, None)
        self._consumed = max(self._consumed, number)

    def _missing(self, number: int) -> list[int]:
        held = self._held.get(number, {})
        return [p for p in range(self._size) if p not in held]

    def _take(self, block_s: float = _BLOCK_S) -> int:
        stream = self._streams.trajectories
        return self._accept(self._insist(lambda: self._streams.claim_groups(stream, CONSUMER, _TAKE, block_s)))

    def _take_until(self, over: threading.Event) -> None:
        with suppress(Stopped):  # the body finds out by itself
            while not over.wait(_AHEAD_EVERY_S):
                self._take(0.0)

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
                new += 1
                spans.taken(group)
                # Here too, first the new prompt, then the old group.
                if self._feeder.refill(group):
                    self._discard(entry, "equal")
                else:
                    held[group.position] = entry
            elif held[group.position].id != entry.id:
                self._discard(entry, "duplicate")
        return new

    def _say_stragglers(self, number: int, missing: list[int], waited_s: float) -> None:
        drop = self._settings.partial_groups is PartialGroups.DROP
        if drop:
            DROPPED.labels("straggler").inc(len(missing))
        get_logger().warning(
            "stragglers_dropped" if drop else "stragglers",
            batch=number,
            missing=len(missing),
            positions=_short(missing),
            waited_s=round(waited_s, 1),
        )

    def _drop_stale(self, number: int) -> None:
        """Of batch `number`, about to be trained on by version `number - 1`, drop groups beyond the bound."""
        bound = number - 1 - self._settings.max_staleness
        held = self._held.get(number, {})
        for position, entry in sorted(held.items()):
            version = oldest_version(entry.message)
            if version is None or version >= bound:
                continue
            # First the new prompt, then the old group: a crash in between repeats both, and loses nothing.
            self._feeder.reissue(entry.message)
            del held[position]
            self._stale[number] = self._stale.get(number, 0) + 1
            self._discard(entry, "stale")

    def _discard(self, entry: Entry[TrajectoryGroup], reason: str) -> None:
        self._insist(lambda: self._streams.discard(self._streams.trajectories, [entry.id]))
        DROPPED.labels(reason).inc()
        group = entry.message
        spans.dropped(group, reason)
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
