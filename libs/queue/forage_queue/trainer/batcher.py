"""Trajectory groups from their stream to a step, and off the stream.

`Arrivals` claims groups, `Batcher` holds them until their step, `UnackedSteps` acknowledges them once the step's
checkpoint is durable.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from prometheus_client import Counter

from forage_proto.v1.trajectory_pb2 import LedgerEntry
from forage_queue.streams.client import Entry, StreamClient
from forage_queue.trainer import spans
from forage_queue.trainer.feeder import Feeder, refill_number
from forage_queue.trainer.idle import IdleTime
from forage_queue.trainer.slots import BufferedGroup, ReadyOrder, Slot, SlotsOfSteps, StrictOrder, slot_of
from forage_records.step_file import Fate, GroupFate
from forage_runtime.errors import ForageError
from forage_runtime.retries import RedisRetry
from forage_runtime.settings import TrainerSettings
from forage_runtime.stop import Stopped
from forage_runtime.telemetry.health import Health
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import Wait, waiting
from forage_trajectory.trajectory import Group

SILENCE_S = 10.0
"""After so long without a new group, claimed entries and lost groups are looked for."""
_CLAIM_COUNT = 64
Entries = list[Entry[Group]]
REJECTED = Counter("forage_trainer_groups_rejected_total", "Groups that this run never issued, or that are malformed")
LOST = Counter("forage_trainer_groups_lost_total", "Groups that vanished from Redis and were issued again")
LOG_INTERVAL_S = 10.0
MAX_STALE_ATTEMPTS = 10
"""Attempts of one position that may be dropped as stale: more mean that the engines do not take what is published."""
_BLOCK_S = 1.0
_AHEAD_INTERVAL_S = 0.05
_NONE: SlotsOfSteps = {}
WAIT_SECONDS = Counter("forage_trainer_wait_seconds_total", "Time waited for groups; grows during the wait")
DROPPED = Counter("forage_trainer_groups_dropped_total", "Groups that are not trained on", ["reason"])
for _reason in ("stale", "duplicate", "equal", "failed", "straggler"):
    DROPPED.labels(_reason)  # exported as 0 from the start
_REPLACED = {
    "stale": "sampled under a policy older than trainer.max_staleness allows, and issued again",
    "equal": "all rewards are equal, and another question took its place (trainer.max_refills)",
    "failed": "a service failed, and the question was issued again (run.repeatable)",
}


@dataclass(frozen=True)
class Receiver:
    """Who waits for groups.

    accept: takes groups, and returns how many were of use. list_missing: returns the slots without a group.
    issue_again: issues a lost group again, from its slot, the next attempt, and the uid of the last one (None where
    none was issued).
    """

    accept: Callable[[Entries], int]
    list_missing: Callable[[], Collection[Slot]]
    issue_again: Callable[[Slot, int, str | None], None]


class Arrivals:
    """The groups of one reply stream that this process has claimed and not acknowledged."""

    def __init__(
        self,
        streams: StreamClient,
        stream: str,
        retry: RedisRetry,
        is_over: Callable[[int], bool] = lambda batch: False,
        on_silence: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Args:
            is_over: whether a batch was consumed: what was issued for it is forgotten, so its groups are not checked.
            on_silence: called when nothing has arrived for a while.
        """
        self._streams = streams
        self._stream = stream
        self._retry = retry
        self._is_over = is_over
        self._on_silence = on_silence
        self._arrived = self._searched = self._looked = time.monotonic()
        self._known: set[bytes] = set()
        self._issues: dict[int, dict[tuple[int, int], str]] = {}

    @property
    def silence_s(self) -> float:
        """Seconds from `begin_wait`, or from the last progress of `receive`, to its last look at the stream."""
        return self._looked - self._arrived

    def begin_wait(self) -> None:
        """Begin to measure the silence."""
        self._arrived = self._searched = self._looked = time.monotonic()

    def receive(self, receiver: Receiver, block_s: float) -> None:
        """Hand over what arrives within `block_s`; after a silence, look for lost groups and issue them again."""
        now = time.monotonic()
        if receiver.accept(self.claim(block_s)):
            self._arrived = time.monotonic()
        elif now - max(self._arrived, self._searched) > SILENCE_S:
            self._searched = now
            self._on_silence()
            before = list(receiver.list_missing())
            lost = self.find_lost(receiver)
            for slot, (attempt, uid) in lost.items():
                receiver.issue_again(slot, attempt, uid)
            if lost or list(receiver.list_missing()) != before:
                self._arrived = time.monotonic()
        self._looked = time.monotonic()

    def claim(self, block_s: float, is_over: Callable[[], bool] = lambda: False) -> Entries:
        """Claim new groups; wait up to `block_s` for the first.

        Args:
            is_over: whether nobody waits for them any more: those whose files are not read yet come with the next call.

        Raises:
            FencedError: a later trainer has taken over.
        """

        def ends() -> bool:
            return self._retry.is_stopping or is_over()

        return self._admit(self._retry(lambda: self._streams.claim_groups(self._stream, _CLAIM_COUNT, block_s, ends)))

    def reclaim(self) -> Entries:
        """Claim the groups that were claimed by an earlier process, or whose delivery to this one was lost.

        Redis marks entries as claimed when it sends them. Where that reply was lost, no other consumer gets them.
        """

        def reclaim() -> Entries:
            return self._streams.reclaim_groups(self._stream, self._known, lambda: self._retry.is_stopping)

        return self._admit(self._retry(reclaim))

    def discard(self, ids: Iterable[bytes]) -> None:
        """Remove groups from the stream that are never trained on."""
        if ids := list(ids):
            self._retry(partial(self._streams.discard, self._stream, ids))
            self.forget(ids)

    def claim_all(self, accept: Callable[[Entries], object]) -> None:
        """Claim every group that is on the stream now, those behind rejected ones too."""
        for _ in range(self._retry(lambda: self._streams.count_backlog(self._stream)) // _CLAIM_COUNT + 1):
            accept(self.claim(0.0))
        accept(self.reclaim())
        while self._streams.has_unread(self._stream):  # a group whose file cannot be read now is not lost
            accept(self.claim(0.0))

    def withdraw_prompts(self) -> None:
        """Remove the prompts that ask for groups of batches that are over, and those of other reply streams."""
        prompts = self._retry(self._streams.read_prompts)
        over = [p.id for p in prompts if p.message.reply_stream != self._stream or self._is_over(p.message.batch)]
        if over:
            self._retry(lambda: self._streams.discard(self._streams.prompts, over))

    def forget(self, ids: Iterable[bytes]) -> None:
        """Note that these groups have left the stream."""
        self._known.difference_update(ids)

    def find_lost(self, receiver: Receiver) -> dict[Slot, tuple[int, str | None]]:
        """Find the missing groups that are nowhere: neither asked for, nor answered.

        A prompt leaves the prompts stream in the transaction that writes its group. So a group whose prompt was gone
        at first and that is not among all groups read after that was deleted, rejected, or lost with the server's data.

        Args:
            receiver: takes the groups that are found on the way.

        Returns:
            slot → (the attempt to issue next, the uid of the last one or None where none was issued).
        """
        absent: dict[int, set[tuple[int, int]]] = {}
        issues: dict[int, dict[tuple[int, int], str]] = {}
        for batch in sorted({batch for batch, _ in receiver.list_missing()}):
            absent[batch] = self._retry(partial(self._streams.find_absent, self._stream, batch))
            issues[batch] = self._retry(partial(self._streams.read_issues, self._stream, batch))
        self.claim_all(receiver.accept)
        lost: dict[Slot, tuple[int, str | None]] = {}
        for batch, position in receiver.list_missing():
            if batch not in issues:
                continue  # it is missing since just now: a group that was there was issued again
            attempts = [attempt for attempt in issues[batch] if attempt[0] == position]
            if absent[batch].issuperset(attempts):
                last = max(attempts, default=None)
                lost[batch, position] = (0, None) if last is None else (last[1] + 1, issues[batch][last])
                LOST.inc()
                get_logger().warning("group_lost", batch=batch, position=position, attempts=len(attempts))
        return lost

    def _admit(self, entries: Entries) -> Entries:
        """The entries that answer a prompt of this run; the others are rejected."""
        admitted = []
        for entry in entries:
            if entry.id in self._known:
                continue  # delivered again by a server that lost the record of the delivery
            if self._is_issued(entry.message):
                self._known.add(entry.id)
                admitted.append(entry)
            else:
                group = entry.message
                content = group.read_packed().SerializeToString()
                self._retry(partial(self._streams.reject, self._stream, entry.id, content))
                REJECTED.inc()
                get_logger().warning(
                    "group_rejected",
                    run=group.run_id,
                    group=group.group_uid,
                    batch=group.batch,
                    position=group.position,
                )
        return admitted

    def _is_issued(self, group: Group) -> bool:
        if self._is_over(group.batch):
            return True
        attempt = group.position, group.attempt
        if self._issues.get(group.batch, {}).get(attempt) != group.group_uid:
            issues = self._retry(partial(self._streams.read_issues, self._stream, group.batch))
            self._issues = {b: table for b, table in self._issues.items() if not self._is_over(b)} | {
                group.batch: issues
            }
        return self._issues[group.batch].get(attempt) == group.group_uid


class BatchTimeoutError(ForageError):
    """A batch did not become complete in time."""


class StaleGroupsError(ForageError):
    """A position was sampled too stale again and again."""


@dataclass(frozen=True)
class Batch:
    """The groups of one step, in the order of their slots.

    number: the step. With trainer.batching=strict its groups were issued for the batch of this number.
    stale: groups that were dropped as stale and issued again.
    stragglers: slots that are settled without a group, because it did not arrive in time.
    dropped: groups of these slots that others have replaced; only those that this process has dropped.
    rollout_idle_s: see `IdleTime`; None where it is unknown.
    ends: batches that are over with this step.
    reserved: see `StrictOrder.reserve`.
    """

    number: int
    entries: tuple[Entry[Group], ...]
    stale: int
    stragglers: tuple[Slot, ...] = ()
    dropped: tuple[GroupFate, ...] = ()
    rollout_idle_s: float | None = None
    ends: tuple[int, ...] = ()
    reserved: tuple[Slot, ...] = ()

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
        self._held: dict[Slot, BufferedGroup] = {}
        self._taken: set[bytes] = set()
        self._slots: Sequence[Slot] = ()
        self._late: Entries = []
        self._consumed = 0
        self._dropped: dict[Slot, list[tuple[str, GroupFate]]] = {}
        self._idle = IdleTime()

    def start(self, consumed: int, replayed: SlotsOfSteps = _NONE, reserved: SlotsOfSteps = _NONE) -> int:
        """Forget the groups of steps up to `consumed`, and reclaim what an earlier process had claimed.

        Args:
            replayed, reserved: see `ReadyOrder.restart`.

        Returns:
            Groups held.
        """
        self._consumed = consumed
        self._order.restart(self._settled, consumed, replayed, reserved)
        self._feeder.align(consumed)
        self._held = {slot: held for slot, held in self._held.items() if slot not in self._settled}
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
                    f"(positions {_format_slots(missing, number)}): is a rollout service running for this run?"
                )
            if now - logged > LOG_INTERVAL_S:
                logged = now
                get_logger().info(
                    "waiting_for_batch",
                    batch=number,
                    have=self._size - len(missing),
                    want=self._size,
                    missing=_format_slots(missing, number),
                    waited_s=round(now - began),
                )
            self._arrivals.receive(receiver, _BLOCK_S)
            self._meanwhile()
            self._drop_stale(number)
        WAIT_SECONDS.inc(time.monotonic() - counted)
        self._health.mark_ready("batch")
        here, missing = self._order.choose(number, self._held)
        entries = tuple(self._held[slot].entry for slot in sorted(here))
        self._taken, self._slots = {entry.id for entry in entries}, [*here, *missing]
        dropped = [pair for slot in self._slots for pair in self._dropped.get(slot, ())]
        return Batch(
            number,
            entries,
            sum(reason == "stale" for reason, _ in dropped),
            tuple(missing),
            tuple(fate for _, fate in dropped),
            self._idle.measure(entries),
            self._settled.find_ends(self._slots),
            self._order.reserve(self._slots),
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
        self._settled.settle(number, self._slots)
        for slot in self._slots:
            held = self._held.pop(slot, None)
            if held is not None and held.entry.id not in self._taken:
                self._late.append(held.entry)
            self._dropped.pop(slot, None)
        self._slots = ()
        self._consumed = max(self._consumed, number)

    def clear(self) -> None:
        """Remove what came too late for its batch, and prompts that ask for more of it: the run is over."""
        self._arrivals.withdraw_prompts()
        self._arrivals.claim_all(self._accept)
        self._discard_late(self._consumed)

    def _list_absent(self, number: int) -> list[Slot]:
        return [slot for slot in self._order.list_candidates(number) if slot not in self._held]

    def _claim_until(self, over: threading.Event) -> None:
        with suppress(Stopped):  # the body meets the stop request itself
            while not over.wait(_AHEAD_INTERVAL_S):  # wait: pause between two claims
                self._accept(self._arrivals.claim(0.0, over.is_set))

    def _issue_again(self, slot: Slot, attempt: int, uid: str | None) -> None:
        self._feeder.issue_again(*slot, attempt, refill_number(uid) if uid else 0)

    def _accept(self, entries: Entries) -> int:
        """Keep new groups and discard the others. Returns how many were new.

        Entries stay unacknowledged while they are held, and after their step until its checkpoint: when this process
        dies, the next one reclaims them. Only superseded groups are discarded, as a position can receive a second group
        after a crash between reissue and discard, and those of slots that steps in the ledger have settled.
        """
        new = 0
        for entry in entries:
            group = entry.message
            slot = slot_of(group)
            if slot in self._settled:
                self._late.append(entry)
            elif group.position >= self._size:
                self._discard(entry, "duplicate")
            elif slot not in self._held:
                new += 1
                spans.record_claim(group)
                # As in `_drop_stale`: the new prompt first, the old group second.
                if self._feeder.repeat(group):
                    self._discard(entry, "failed")
                elif self._feeder.refill(group):
                    self._discard(entry, "equal")
                else:
                    self._held[slot] = BufferedGroup(entry, oldest_version(group))
            elif self._held[slot].entry.id != entry.id:
                self._discard(entry, "duplicate")
        return new

    def _report_stragglers(self, number: int, missing: list[Slot], waited_s: float) -> None:
        DROPPED.labels("straggler").inc(len(missing))
        get_logger().warning(
            "stragglers_dropped",
            batch=number,
            missing=len(missing),
            positions=_format_slots(missing, number),
            waited_s=round(waited_s, 1),
        )

    def _discard_late(self, acknowledged: int) -> None:
        late, self._late = self._late, []
        for entry in late:
            if self._settled.step_of(slot_of(entry.message)) <= acknowledged:
                self._discard(entry, "duplicate")
            else:
                self._late.append(entry)

    def _drop_stale(self, number: int) -> None:
        """Drop the groups that are too stale for version `number - 1`, which is about to train in step `number`."""
        bound = number - 1 - self._settings.max_staleness
        for slot in self._order.list_candidates(number):
            held = self._held.get(slot)
            if held is None or held.oldest is None or held.oldest >= bound:
                continue
            group = held.entry.message
            attempts = group.attempt - refill_number(group.group_uid)
            if attempts >= MAX_STALE_ATTEMPTS:
                raise StaleGroupsError(
                    f"batch {slot[0]}, position {slot[1]}: after {attempts} further attempts the group was still "
                    f"sampled under version {held.oldest}, older than {bound}: the engines do not take what is "
                    "published; look for policy_refused in the rollout service's log"
                )
            # The new prompt first, the old group second. A crash between the two repeats both, and issuing is
            # idempotent; in the other order it would leave the position without a group until it is found missing.
            self._feeder.reissue(group, self._order.note_stale(number, slot))
            del self._held[slot]
            self._discard(held.entry, "stale")

    def _discard(self, entry: Entry[Group], reason: str) -> None:
        self._arrivals.discard([entry.id])
        DROPPED.labels(reason).inc()
        group = entry.message
        if because := _REPLACED.get(reason):
            fate = GroupFate(group.group_uid, group.position, group.attempt, Fate.DROPPED, f"{reason}: {because}")
            self._dropped.setdefault(slot_of(group), []).append((reason, fate))
        spans.record_drop(group, reason)
        get_logger().info(
            "group_dropped",
            reason=reason,
            group=group.group_uid,
            batch=group.batch,
            position=group.position,
            attempt=group.attempt,
        )


def _format_slots(slots: list[Slot], number: int) -> str:
    """The positions of a batch, or batch/position of another one."""
    names = (str(position) if batch == number else f"{batch}/{position}" for batch, position in slots[:8])
    return ", ".join(names) + (f" and {len(slots) - 8} more" if len(slots) > 8 else "")


@dataclass(frozen=True)
class ConsumedGroup:
    """A group that was consumed by a step. entry: its id on the trajectories stream."""

    batch: int
    position: int
    attempt: int
    uid: str
    entry: str


@dataclass(frozen=True)
class ConsumedStep:
    """A step and the groups that it consumed.

    dropped: uids of the stragglers: groups that did not arrive in time. ends: batches that are over with the step.
    """

    step: int
    epoch: int
    groups: tuple[ConsumedGroup, ...]
    dropped: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()


class UnackedSteps:
    """Acknowledges the groups of steps once a durable checkpoint holds their effect on the weights.

    The order makes every group count exactly once. Before the checkpoint is durable, a crash loses the step, and its
    groups are still on the stream for the next process. After that, the groups are trained on: the checkpoint's
    manifest names them, so the next process acknowledges them even where this one died before it could.
    """

    def __init__(self, streams: StreamClient, retry: RedisRetry) -> None:
        self._streams = streams
        self._retry = retry
        self._pending: list[ConsumedStep] = []
        self._acknowledged: list[ConsumedStep] = []

    @property
    def steps(self) -> tuple[ConsumedStep, ...]:
        """The steps since the last acknowledgement, for the manifest of the next checkpoint."""
        return tuple(self._pending)

    def add(self, batch: Batch, epoch: int, dropped: tuple[str, ...]) -> None:
        """Add a step that was just taken.

        Args:
            dropped: uids of its stragglers.
        """
        groups = tuple(
            ConsumedGroup(g.batch, g.position, g.attempt, g.group_uid, entry.id.decode())
            for entry in batch.entries
            for g in [entry.message]
        )
        self._pending.append(ConsumedStep(batch.number, epoch, groups, dropped, batch.ends))

    def restore(self, consumed: Iterable[ConsumedStep], acknowledged: Container[int]) -> None:
        """Take over the steps of a checkpoint that are not in the ledger, which has the acknowledged ones."""
        self._pending = [step for step in consumed if step.step not in acknowledged]

    def acknowledge(self, until: int) -> list[bytes]:
        """Acknowledge the pending steps up to that of a durable checkpoint, and enter them in the ledger.

        Those of the call before are acknowledged again, which changes nothing unless the server lost that record.

        Returns:
            The ids of the entries that have left the stream.
        """
        acknowledged = []
        durable = [step for step in self._pending if step.step <= until]
        for step in [*self._acknowledged, *durable]:
            entry = LedgerEntry(
                step=step.step,
                group_uids=[group.uid for group in step.groups],
                epoch=step.epoch,
                acknowledged_unix_ms=int(time.time() * 1000),
                dropped_group_uids=step.dropped,
            )
            ids = [group.entry.encode() for group in step.groups]
            self._retry(partial(self._streams.acknowledge, entry, ids, step.ends))
            acknowledged += ids
        self._acknowledged, self._pending = durable, self._pending[len(durable) :]
        return acknowledged
