"""Groups on the streams: the rollout service writes them, the trainer claims and acknowledges them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from google.protobuf.message import DecodeError

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_proto.v1.trajectory_pb2 import LedgerEntry, Prompt
from forage_queue.streams.entries import RECLAIM_SCAN, Entry, EntryStreams
from forage_queue.streams.history import History, recorded
from forage_queue.streams.payloads import ORPHAN_S, PayloadLostError, Payloads
from forage_queue.streams.run_keys import GROUP
from forage_runtime.errors import SettingsError, UnavailableError
from forage_runtime.settings import RedisSettings
from forage_runtime.telemetry.logs import get_logger

if TYPE_CHECKING:
    from forage_trajectory.trajectory import Group

_PACKED = b"p"
"""The field of an entry: a PackedGroup."""
_PENDING_PAGE = 1000
_SWEEP_S = ORPHAN_S / 4
_NOBODY_WAITS = 2
_READERS = 8
"""Files of groups that are read at once."""
VALIDATION = "validation-"
"""Begins the names of the streams to which groups of validations are written."""
IsOver: TypeAlias = Callable[[], bool]
"""Whether nobody waits any more: files whose reading has not begun are left for the next call."""
Decode: TypeAlias = "Callable[[Sequence[PackedGroup]], Sequence[Group | DecodeError]]"
"""Decodes groups side by side, each into a group or the error that says why it is none."""


@dataclass(frozen=True)
class _Call:
    """A call of `finish`: its name, the group that was given, and its last attempt."""

    name: str
    group: PackedGroup
    tried_at: float


class GroupStreams(EntryStreams):
    """The streams of one run that carry groups."""

    def __init__(
        self,
        settings: RedisSettings,
        run_id: str,
        patience_s: float = 60.0,
        history: History | None = None,
        payloads: Payloads | None = None,
        decode: Decode | None = None,
    ) -> None:
        """
        Args:
            payloads: files for large groups; None: this client writes all into Redis, and reads no file.
            decode: decodes the groups of `trajectories` that claims return; None, and for groups of validations: one
                after the other, with columns in memory.
        """
        super().__init__(settings, run_id, patience_s, history)
        self._payloads = payloads
        self._decode_groups = decode or _decode_all
        self._unread: dict[str, list[Any]] = {}  # rows of a stream whose files could not be read yet
        self._calls: dict[bytes, _Call] = {}  # of `finish` that have not succeeded yet, by entry
        self._swept = -math.inf
        self._has_warned = False

    def open_replies(self, stream: str, batch: int) -> None:
        """Create a reply stream; if it did not exist, what was issued for it is issued again.

        Raises:
            FencedError: a later trainer has taken over.
        """
        keys = [stream, self.key("epoch"), self._issue_table(stream, batch)]
        self._run("create_group", keys, GROUP, self.epoch)

    def is_reply_stream(self, name: str) -> bool:
        """Whether groups of this run may be written to a key that a prompt names; empty: that of trajectories."""
        return name in ("", self.trajectories) or name.startswith(self.key(VALIDATION))

    @recorded
    def close_replies(self, stream: str, batch: int) -> None:
        """Delete a reply stream and the table of what was issued for it.

        Raises:
            FencedError: a later trainer has taken over; so do `issue`, `reclaim_groups`, `acknowledge`, `discard`,
                `prune`, `delete_orphans` and `publish`.
        """
        keys = [stream, self._issue_table(stream, batch), self._stored_table(stream)]
        self._delete_payloads(stream, self._run_fenced("close_stream", keys), is_closed=True)

    @recorded
    def finish(self, entry: Entry[Prompt], group: PackedGroup) -> bool:
        """Acknowledge a prompt and write its group, atomically.

        False if another worker has finished it, or nobody waits for the group any more. A call that failed may have
        done it: where it is repeated, with the same group, that is found out, and a file is not written again. One that
        is not repeated for `ORPHAN_S` is forgotten.
        """
        stream = entry.message.reply_stream or self.trajectories
        call = self._begin_call(entry.id, group)
        packed = self._store(stream, call.name, group) or group
        name = packed.stored.name
        keys = [self.prompts, stream, self.trajectories, self._stored_table(stream), self.key("finished")]
        result = int(self._run("finish", keys, GROUP, entry.id, packed.SerializeToString(), name, call.name))
        self._forget_call(entry.id)
        written = result == 1
        if name and not written:
            self._delete_payloads(stream, [name.encode()], is_closed=result == _NOBODY_WAITS)
        return written

    def _begin_call(self, id: bytes, group: PackedGroup) -> _Call:
        """The call of `finish` that writes a group: that of before where it is repeated."""
        now = time.monotonic()
        for other, call in list(self._calls.items()):
            if now - call.tried_at > ORPHAN_S:
                self._forget_call(other)
        before = self._calls.get(id)
        if before is not None and before.group is not group:
            self._forget_call(id)
            before = None
        call = _Call(before.name if before else os.urandom(8).hex(), group, now)
        self._calls[id] = call
        return call

    def _forget_call(self, id: bytes) -> None:
        call = self._calls.pop(id, None)
        if call is not None and self._payloads is not None:
            self._payloads.forget(call.name)

    @recorded
    def claim_groups(
        self, stream: str, count: int, block_s: float, is_over: IsOver = lambda: False
    ) -> list[Entry[Group]]:
        """Claim new groups; wait up to `block_s` for the first.

        Raises:
            FencedError: a later trainer has taken over. It reclaims what was claimed here.
        """
        rows = self._read_new(stream, self._trainer, count, block_s)
        self.check_epoch()
        return self._read_groups(stream, rows, is_over)

    @recorded
    def reclaim_groups(
        self, stream: str, known: Collection[bytes], is_over: IsOver = lambda: False
    ) -> list[Entry[Group]]:
        """Claim groups that are claimed and not acknowledged, except those that the caller knows.

        They were claimed by an earlier process of the trainer, or their delivery to this one was lost.
        """
        entries: list[Entry[Group]] = []
        begin = "-"
        while page := self._call(self._redis.xpending_range, stream, GROUP, begin, "+", _PENDING_PAGE):
            ids = [row["message_id"] for row in page if row["message_id"] not in known]
            for i in range(0, len(ids), RECLAIM_SCAN):
                rows = self._run_fenced("reclaim", [stream], GROUP, self._trainer, *ids[i : i + RECLAIM_SCAN])
                pairs = [(id, dict(zip(f[::2], f[1::2], strict=True))) for id, f in filter(None, rows)]
                entries += self._read_groups(stream, pairs, is_over)
            begin = "(" + page[-1]["message_id"].decode()
        return entries

    @recorded
    def acknowledge(self, ledger: LedgerEntry, ids: Sequence[bytes], ends: Sequence[int] | None = None) -> None:
        """Remove a step's groups from the stream and record the step in the ledger, atomically.

        Args:
            ends: batches that are over with this step, of which nothing is issued any more; None: that of its number.
        """
        stream, over = self.trajectories, [ledger.step] if ends is None else ends
        keys = [stream, self.key("ledger"), self.key("issued"), self._stored_table(stream)]
        keys += [self._issue_table(stream, batch) for batch in over]
        step = str(ledger.step), ledger.SerializeToString(), str(len(over)), *map(str, over)
        names = self._run_fenced("acknowledge", keys, GROUP, *step, *ids)
        self._delete_payloads(stream, names)

    @recorded
    def discard(self, stream: str, ids: Sequence[bytes]) -> None:
        """Remove groups that are never trained on, stale or superseded ones, or the prompts of such groups."""
        names = self._run_fenced("discard", [stream, self._stored_table(stream)], GROUP, *ids)
        self._delete_payloads(stream, names)

    # Files of large groups, see `payloads`.

    def require_payloads(self) -> None:
        """Check, before this trainer takes the run over, that the files of its groups are where it reads them.

        Raises:
            SettingsError: they are in another place.
            UnavailableError: the place cannot be read now.
        """
        mark = self._read_mark()
        if self._payloads is None or not mark or self._payloads.holds(mark):
            return
        groups = self._call(self._redis.xlen, self.trajectories)
        if count := min(groups, self._call(self._redis.hlen, self._stored_table(self.trajectories))):
            raise SettingsError(
                f"{count} groups of this run that wait for the trainer have files, and {self._payloads.where} is not "
                "the place of these files: give the redis.payloads_url or the run.dir with which the run was started,"
                " mount its volume, or copy its files to here; an empty file 'shared' here accepts that these groups "
                "are lost and sampled again"
            )

    def offer_payloads(self) -> None:
        """Let writers use files: announce how they recognise the place from which this trainer reads them.

        Repeat it: a server that loses its data forgets it.

        Raises:
            FencedError: a later trainer has taken over.
        """
        if self._payloads is not None:
            self._run_fenced("offer_payloads", [self.key("payloads")], self._payloads.offer())

    def has_unread(self, stream: str) -> bool:
        """Whether claimed groups wait until their files can be read."""
        return stream in self._unread

    def delete_orphans(self) -> None:
        """Delete old files that no entry names; does nothing where it did so a short time ago."""
        if self._payloads is None or time.monotonic() - self._swept < _SWEEP_S:
            return
        # First the files, then the entries: what is written between the two is young.
        for name, old in self._payloads.list_old().items():
            stream = self.key(name)
            named = self._run_fenced("list_stored", [stream, self._stored_table(stream)])
            self._payloads.delete(name, old - {one.decode() for one in named})
        self._swept = time.monotonic()

    def _store(self, stream: str, call: str, packed: PackedGroup) -> PackedGroup | None:
        """Write a group that is too large for Redis into a file; None where it is not, or cannot be."""
        payloads = self._payloads
        if payloads is None or payloads.inline_bytes is None:
            return None
        if len(packed.columns) + len(packed.texts) <= payloads.inline_bytes:
            return None
        mark = self._read_mark()
        if payloads.shares(mark):
            return payloads.put(self._shorten(stream), call, packed)
        if mark and not self._has_warned:
            self._has_warned = True
            get_logger().warning("payloads_not_shared", place=payloads.where, remedy="set redis.payloads_url")
        return None

    def _read_mark(self) -> str:
        return (self._call(self._redis.get, self.key("payloads")) or b"").decode()

    def _delete_payloads(self, stream: str, names: Sequence[bytes], is_closed: bool = False) -> None:
        if (names or is_closed) and self._payloads is not None:
            self._payloads.delete(self._shorten(stream), [name.decode() for name in names], is_closed)

    def _read_groups(self, stream: str, rows: Sequence[Any], is_over: IsOver) -> list[Entry[Group]]:
        """Read entries, also those whose files could not be read before; what is no group is rejected.

        Raises:
            UnavailableError: no file can be read now. What was not read is kept for the next call.
        """
        # Those of before may have been claimed again. All are kept until each is dealt with: a rejection may fail.
        kept = dict([*self._unread.get(stream, ()), *rows])
        self._unread[stream] = list(kept.items())
        found: list[tuple[bytes, PackedGroup]] = []
        unavailable: UnavailableError | None = None
        for id, result in zip(list(kept), self._read_all(stream, list(kept.values()), is_over), strict=True):
            if isinstance(result, UnavailableError):
                unavailable = result
            elif isinstance(result, PackedGroup):
                found.append((id, result))
                del kept[id]
            elif result is not None:
                if isinstance(result, PayloadLostError):  # the group is found lost, and issued again
                    get_logger().warning("payload_lost", stream=self._shorten(stream), detail=str(result))
                self.reject(stream, id, repr(kept.pop(id)).encode())  # no trainer could ever use it
        self._unread[stream] = list(kept.items())
        if not kept:
            del self._unread[stream]
        if unavailable is not None and not found:
            raise unavailable
        decode = self._decode_groups if stream == self.trajectories else _decode_all
        entries = []
        for (id, packed), group in zip(found, decode([packed for _, packed in found]), strict=True):
            if isinstance(group, DecodeError):
                self.reject(stream, id, packed.SerializeToString())
            else:
                entries.append(Entry(id, group))
        return entries

    def _read_all(self, stream: str, rows: Sequence[Any], is_over: IsOver) -> list[PackedGroup | Exception | None]:
        """Read several at once, each into a group or the error that says why there is none; None where it is over."""

        def read(fields: dict[bytes, bytes]) -> PackedGroup | Exception | None:
            try:
                return None if is_over() else self._read_packed(stream, fields)
            except (DecodeError, KeyError, TypeError, PayloadLostError, UnavailableError) as error:
                return error

        if self._payloads is None or len(rows) < 2:
            return [read(fields) for fields in rows]
        with ThreadPoolExecutor(_READERS, "payloads") as threads:
            return [one.result() for one in [threads.submit(read, fields) for fields in rows]]

    def _read_packed(self, stream: str, fields: dict[bytes, bytes]) -> PackedGroup:
        packed = PackedGroup.FromString(fields[_PACKED])
        if packed.HasField("stored"):
            if self._payloads is None:
                raise UnavailableError("this reader has no folder of payloads: give it one")
            self._payloads.fetch(self._shorten(stream), packed)
        return packed

    @property
    def _trainer(self) -> str:
        """The trainer's consumer: each has its own, so that an old one cannot take its successor's entries."""
        return f"trainer-{self.epoch}"

    def _issue_table(self, stream: str, batch: int) -> str:
        return self.key(f"issued:{self._shorten(stream)}:{batch}")


def _decode_all(packed: Sequence[PackedGroup]) -> list[Group | DecodeError]:
    from forage_trajectory.codec import decode_group  # imports NumPy, which the command needs for nothing else here

    groups: list[Group | DecodeError] = []
    for one in packed:
        try:
            groups.append(decode_group(one))
        except DecodeError as error:
            groups.append(error)
    return groups
