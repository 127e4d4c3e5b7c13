"""Groups from the trajectories stream, assembled into the batches of the steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from prometheus_client import Counter

from forage_queue.streams.client import Entry, StreamClient
from forage_queue.trainer import spans
from forage_queue.trainer.arrivals import Arrivals, Entries, Receiver
from forage_queue.trainer.dataset import refill_number
from forage_queue.trainer.feeder import Feeder
from forage_queue.trainer.idle import IdleTime
from forage_queue.trainer.places import Held, Place, PlacesOfSteps, ReadyOrder, StrictOrder, place_of
from forage_records.step_file import Fate, GroupFate
from forage_runtime.errors import ForageError
from forage_runtime.retries import RedisRetry
from forage_runtime.settings import TrainerSettings
from forage_runtime.stop import Stopped
from forage_runtime.telemetry.health import Health
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import Wait, waiting
from forage_trajectory.trajectory import Group

LOG_INTERVAL_S = 10.0
MAX_STALE_ATTEMPTS = 10
"""Attempts of one position that may be dropped as stale: more mean that the engines do not take what is published."""
_BLOCK_S = 1.0
_AHEAD_INTERVAL_S = 0.05
_NONE: PlacesOfSteps = {}
WAIT_SECONDS = Counter("forage_trainer_wait_seconds_total", "Time waited for groups; grows during the wait")
DROPPED = Counter("forage_trainer_groups_dropped_total", "Groups that are not trained on", ["reason"])
for _reason in ("stale", "duplicate", "equal", "failed", "straggler"):
    DROPPED.labels(_reason)  # exported as 0 from the start
_REPLACED = {
    "stale": "sampled under a policy older than trainer.max_staleness allows, and issued again",
    "equal": "all rewards are equal, and another question took its place (trainer.max_refills)",
    "failed": "a service failed, and the question was issued again (run.repeatable)",
}


class BatchTimeoutError(ForageError):
    """A batch did not become complete in time."""


class StaleGroupsError(ForageError):
    """A position was sampled too stale again and again."""


@dataclass(frozen=True)
class Batch:
    """The groups of one step, in the order of their places.

    number: the step. With trainer.batching=strict its groups were issued for the batch of this number.
    stale: groups that were dropped as stale and issued again.
    stragglers: places that are settled without a group, because it did not arrive in time.
    dropped: groups of these places that others have replaced; only those that this process has dropped.
    rollout_idle_s: see `IdleTime`; None where it is unknown.
    ends: batches that are over with this step.
    reserved: see `StrictOrder.reserve`.
    """

    number: int
    entries: tuple[Entry[Group], ...]
    stale: int
    stragglers: tuple[Place, ...] = ()
    dropped: tuple[GroupFate, ...] = ()
    rollout_idle_s: float | None = None
    ends: tuple[int, ...] = ()
    reserved: tuple[Place, ...] = ()

    @property
    def groups(self) -> list[Group]:
        return [entry.message for entry in self.entries]

    def with_groups(self, groups: Iterable[Group]) -> Batch:
        """The batch with other groups, one for each."""
        pairs = zip(self.entries, groups, strict=True)
        return replace(self, entries=tuple(Entry(entry.id, group) for entry, group in pairs))

    @property
    def metrics(self) -> dict[str, float | None]:
        """Counts of dropped and refilled groups, and the pause; refilled: replaced because their rewards were equal."""
        return {
            "dropped_stale": self.stale,
            "dropped_stragglers": len(self.stragglers),
            "refilled_groups": sum(refill_number(group.group_uid) for group in self.groups),
            "rollout_idle_s": self.rollout_idle_s,
        }


def oldest_version(group: Group) -> int | None:
    """The lowest policy version of any token; None for a group without tokens."""
    return min((s.version for t in group.trajectories for s in t.segments), default=None)


class Batcher:
    """Holds groups until their step, which `StrictOrder` or `ReadyOrder` names.

    At most those of (max_staleness + 1) batches are in memory.
    """

    def __init__(
        self,
        streams: StreamClient,
        batch_size: int,
        settings: TrainerSettings,
        feeder: Feeder,
        retry: RedisRetry,
        health: Health,
        on_silence: Callable[[], object] = lambda: None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Args:
            feeder: issues stale groups again, and other questions for groups of equal rewards.
            on_silence: called when nothing has arrived for a while.
            meanwhile: called about every second of a wait.
        """
        self._size = batch_size
        self._settings = settings
        self._feeder = feeder
        self._retry = retry
        self._health = health
        self._meanwhile = meanwhile
        self._arrivals = Arrivals(streams, streams.trajectories, retry, feeder.settled.is_over, on_silence)
        self._order: StrictOrder | ReadyOrder = StrictOrder(batch_size)
        if settings.batching == "ready":
            self._order = ReadyOrder(batch_size, settings.max_staleness, feeder.list_open)
        self._settled = feeder.settled
        self._held: dict[Place, Held] = {}
        self._taken: set[bytes] = set()
        self._places: Sequence[Place] = ()
        self._late: Entries = []
        self._consumed = 0
        self._dropped: dict[Place, list[tuple[str, GroupFate]]] = {}
        self._idle = IdleTime()

    def start(self, consumed: int, replayed: PlacesOfSteps = _NONE, reserved: PlacesOfSteps = _NONE) -> int:
        """Forget the groups of steps up to `consumed`, and reclaim what an earlier process had claimed.

        Args:
            replayed, reserved: see `ReadyOrder.restart`.

        Returns:
            Groups held.
        """
        self._consumed = consumed
        self._order.restart(self._settled, consumed, replayed, reserved)
        self._feeder.align(consumed)
        self._held = {place: held for place, held in self._held.items() if place not in self._settled}
        self._accept(self._arrivals.reclaim())
        self._discard_late(consumed)
        return len(self._held)

    def next_batch(self, number: int, timeout_s: float) -> Batch:
        """Wait for batch `number`: complete, or without the stragglers that the settings say to drop.

        Raises:
            BatchTimeoutError: nothing arrived for `timeout_s` while groups were missing.
            StaleGroupsError: a position was sampled too stale again and again.
            FencedError: a later trainer has taken over.
            Stopped: the process was asked to stop.
        """
        with waiting("groups of the next batch", on="rollout", limit_s=timeout_s) as wait:
            return self._collect(number, timeout_s, wait)

    def _collect(self, number: int, timeout_s: float, wait: Wait) -> Batch:
        began = logged = counted = time.monotonic()
        self._arrivals.begin_wait()
        receiver = Receiver(self._accept, lambda: self._list_absent(number), self._issue_again)
        first: float | None = None
        straggler_timeout = self._settings.straggler_timeout_s
        self._drop_stale(number)
        while missing := self._order.choose(number, self._held)[1]:
            wait.detail = f"batch {number}: {len(missing)} of {self._size} groups missing"
            wait.renew(self._arrivals.silence_s)
            self._health.wait_for("batch", wait.detail)
            now = time.monotonic()
            WAIT_SECONDS.inc(now - counted)
            counted = now
            first = (first or now) if len(missing) < self._size else None
            if first is not None and 0 < straggler_timeout < now - first:
                self._report_stragglers(number, missing, now - first)
                break
            if self._arrivals.silence_s > timeout_s:
                raise BatchTimeoutError(
                    f"batch {number} lacks {len(missing)} of {self._size} groups after {now - began:.0f} s "
                    f"(positions {_format_places(missing, number)}): is a rollout service running for this run?"
                )
            if now - logged > LOG_INTERVAL_S:
                logged = now
                get_logger().info(
                    "waiting_for_batch",
                    batch=number,
                    have=self._size - len(missing),
                    want=self._size,
                    missing=_format_places(missing, number),
                    waited_s=round(now - began),
                )
            self._arrivals.receive(receiver, _BLOCK_S)
            self._meanwhile()
            self._drop_stale(number)
        WAIT_SECONDS.inc(time.monotonic() - counted)
        self._health.mark_ready("batch")
        here, missing = self._order.choose(number, self._held)
        entries = tuple(self._held[place].entry for place in sorted(here))
        self._taken, self._places = {entry.id for entry in entries}, [*here, *missing]
        dropped = [pair for place in self._places for pair in self._dropped.get(place, ())]
        return Batch(
            number,
            entries,
            sum(reason == "stale" for reason, _ in dropped),
            tuple(missing),
            tuple(fate for _, fate in dropped),
            self._idle.measure(entries),
            self._settled.find_ends(self._places),
            self._order.reserve(self._places),
        )

    @contextmanager
    def assemble_ahead(self) -> Iterator[None]:
        """Assemble coming batches on a thread while the body computes; the body must not use the batcher.

        Groups of equal rewards are so replaced early, while the rollout service still has time to sample others.
        Staleness is checked only when a batch's own step begins: it depends on the version trained until then.
        """
        if self._settings.max_staleness == 0:  # no prompts are outstanding during a step
            yield
            return
        over = threading.Event()
        with ThreadPoolExecutor(1, "ahead") as pool:
            claiming = pool.submit(self._claim_until, over)
            try:
                yield
            finally:
                over.set()
            claiming.result()

    def forget(self, ids: Iterable[bytes], acknowledged: int) -> None:
        """Note that these groups, and with them every step up to `acknowledged`, were acknowledged.

        Until then they are ours, and what came too late for its step stays as well: a crash repeats the step with it.
        """
        self._arrivals.forget(ids)
        self._settled.forget(acknowledged)
        self._discard_late(acknowledged)

    def mark_consumed(self, number: int) -> None:
        """Note that the step has trained on the batch it got last: later copies of its groups are superseded."""
        self._settled.settle(number, self._places)
        for place in self._places:
            held = self._held.pop(place, None)
            if held is not None and held.entry.id not in self._taken:
                self._late.append(held.entry)
            self._dropped.pop(place, None)
        self._places = ()
        self._consumed = max(self._consumed, number)

    def clear(self) -> None:
        """Remove what came too late for its batch, and prompts that ask for more of it: the run is over."""
        self._arrivals.withdraw_prompts()
        self._arrivals.claim_all(self._accept)
        self._discard_late(self._consumed)

    def _list_absent(self, number: int) -> list[Place]:
        return [place for place in self._order.list_candidates(number) if place not in self._held]

    def _claim_until(self, over: threading.Event) -> None:
        with suppress(Stopped):  # the body meets the stop request itself
            while not over.wait(_AHEAD_INTERVAL_S):  # wait: pause between two claims
                self._accept(self._arrivals.claim(0.0, over.is_set))

    def _issue_again(self, place: Place, attempt: int, uid: str | None) -> None:
        self._feeder.issue_again(*place, attempt, refill_number(uid) if uid else 0)

    def _accept(self, entries: Entries) -> int:
        """Keep new groups and discard the others. Returns how many were new.

        Entries stay unacknowledged while they are held, and after their step until its checkpoint: when this process
        dies, the next one reclaims them. Only superseded groups are discarded, as a position can receive a second group
        after a crash between reissue and discard, and those of places that steps in the ledger have settled.
        """
        new = 0
        for entry in entries:
            group = entry.message
            place = place_of(group)
            if place in self._settled:
                self._late.append(entry)
            elif group.position >= self._size:
                self._discard(entry, "duplicate")
            elif place not in self._held:
                new += 1
                spans.record_claim(group)
                # As in `_drop_stale`: the new prompt first, the old group second.
                if self._feeder.repeat(group):
                    self._discard(entry, "failed")
                elif self._feeder.refill(group):
                    self._discard(entry, "equal")
                else:
                    self._held[place] = Held(entry, oldest_version(group))
            elif self._held[place].entry.id != entry.id:
                self._discard(entry, "duplicate")
        return new

    def _report_stragglers(self, number: int, missing: list[Place], waited_s: float) -> None:
        DROPPED.labels("straggler").inc(len(missing))
        get_logger().warning(
            "stragglers_dropped",
            batch=number,
            missing=len(missing),
            positions=_format_places(missing, number),
            waited_s=round(waited_s, 1),
        )

    def _discard_late(self, acknowledged: int) -> None:
        late, self._late = self._late, []
        for entry in late:
            if self._settled.step_of(place_of(entry.message)) <= acknowledged:
                self._discard(entry, "duplicate")
            else:
                self._late.append(entry)

    def _drop_stale(self, number: int) -> None:
        """Drop the groups that are too stale for version `number - 1`, which is about to train in step `number`."""
        bound = number - 1 - self._settings.max_staleness
        for place in self._order.list_candidates(number):
            held = self._held.get(place)
            if held is None or held.oldest is None or held.oldest >= bound:
                continue
            group = held.entry.message
            attempts = group.attempt - refill_number(group.group_uid)
            if attempts >= MAX_STALE_ATTEMPTS:
                raise StaleGroupsError(
                    f"batch {place[0]}, position {place[1]}: after {attempts} further attempts the group was still "
                    f"sampled under version {held.oldest}, older than {bound}: the engines do not take what is "
                    "published; look for policy_refused in the rollout service's log"
                )
            # The new prompt first, the old group second. A crash between the two repeats both, and issuing is
            # idempotent; in the other order it would leave the position without a group until it is found missing.
            self._feeder.reissue(group, self._order.note_stale(number, place))
            del self._held[place]
            self._discard(held.entry, "stale")

    def _discard(self, entry: Entry[Group], reason: str) -> None:
        self._arrivals.discard([entry.id])
        DROPPED.labels(reason).inc()
        group = entry.message
        if because := _REPLACED.get(reason):
            fate = GroupFate(group.group_uid, group.position, group.attempt, Fate.DROPPED, f"{reason}: {because}")
            self._dropped.setdefault(place_of(group), []).append((reason, fate))
        spans.record_drop(group, reason)
        get_logger().info(
            "group_dropped",
            reason=reason,
            group=group.group_uid,
            batch=group.batch,
            position=group.position,
            attempt=group.attempt,
        )


def _format_places(places: list[Place], number: int) -> str:
    """The positions of a batch, or batch/position of another one."""
    names = (str(position) if batch == number else f"{batch}/{position}" for batch, position in places[:8])
    return ", ".join(names) + (f" and {len(places) - 8} more" if len(places) > 8 else "")
