"""Groups that arrive on a reply stream: claimed, found again after a lost delivery, and checked against the issues."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial

from prometheus_client import Counter

from forage_queue.streams.client import Entry, StreamClient
from forage_queue.trainer.places import Place
from forage_runtime.retries import RedisRetry
from forage_runtime.telemetry.logs import get_logger
from forage_trajectory.trajectory import Group

SILENCE_S = 10.0
"""After so long without a new group, claimed entries and lost groups are looked for."""
_CLAIM_COUNT = 64
Entries = list[Entry[Group]]
REJECTED = Counter("forage_trainer_groups_rejected_total", "Groups that this run never issued, or that are malformed")
LOST = Counter("forage_trainer_groups_lost_total", "Groups that vanished from Redis and were issued again")


@dataclass(frozen=True)
class Receiver:
    """Who waits for groups.

    accept: takes groups, and returns how many were of use. list_missing: returns the places without a group.
    issue_again: issues a lost group again, from its place, the next attempt, and the uid of the last one (None where
    none was issued).
    """

    accept: Callable[[Entries], int]
    list_missing: Callable[[], Collection[Place]]
    issue_again: Callable[[Place, int, str | None], None]


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
            for place, (attempt, uid) in lost.items():
                receiver.issue_again(place, attempt, uid)
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

    def find_lost(self, receiver: Receiver) -> dict[Place, tuple[int, str | None]]:
        """Find the missing groups that are nowhere: neither asked for, nor answered.

        A prompt leaves the prompts stream in the transaction that writes its group. So a group whose prompt was gone
        at first and that is not among all groups read after that was deleted, rejected, or lost with the server's data.

        Args:
            receiver: takes the groups that are found on the way.

        Returns:
            place → (the attempt to issue next, the uid of the last one or None where none was issued).
        """
        absent: dict[int, set[tuple[int, int]]] = {}
        issues: dict[int, dict[tuple[int, int], str]] = {}
        for batch in sorted({batch for batch, _ in receiver.list_missing()}):
            absent[batch] = self._retry(partial(self._streams.find_absent, self._stream, batch))
            issues[batch] = self._retry(partial(self._streams.read_issues, self._stream, batch))
        self.claim_all(receiver.accept)
        lost: dict[Place, tuple[int, str | None]] = {}
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
        place = group.position, group.attempt
        if self._issues.get(group.batch, {}).get(place) != group.group_uid:
            issues = self._retry(partial(self._streams.read_issues, self._stream, group.batch))
            self._issues = {b: table for b, table in self._issues.items() if not self._is_over(b)} | {
                group.batch: issues
            }
        return self._issues[group.batch].get(place) == group.group_uid
