"""Prompts from trainer to rollout and trajectory groups back, each exactly once, on Redis streams.

Rules (one Lua script each in `scripts.lua`, which Redis runs atomically and logs as one transaction):

- *issue*: a (batch, position, attempt) enters the prompts stream once, however often it is issued.
- *finish*: a prompt is acknowledged and its group written together, or neither; if two workers claim one entry, the
  first to finish wins. Groups are packed (`forage_trajectory.codec`); of a large one the entry has a reference to a
  file (`payloads`).
- *acknowledge*: the groups of a step leave the stream, and the step enters the ledger, together.
- *publish*: a policy replaces the current one; *set shift*: so does a shift at shared GPUs.

Every script of the trainer carries its epoch and is refused once a later trainer has acquired one. Every script is
idempotent, so the client can retry after a lost reply and through a restart of the server. Every script runs on a
server that is out of memory too: refusing one could block the call that frees memory. The dispatcher's back-pressure
bounds what the streams hold. The entries of a worker that stops calling `keep_alive` are reclaimed by another worker.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_proto.v1.trajectory_pb2 import LedgerEntry, Policy, Prompt, Replica, Shift
from forage_queue.streams.history import History, recorded
from forage_queue.streams.payloads import ORPHAN_S, PayloadLostError, Payloads
from forage_queue.streams.prompt_identity import Issue
from forage_queue.streams.run_keys import GROUP, RunKeys
from forage_runtime.errors import SettingsError, UnavailableError
from forage_runtime.settings import RedisSettings
from forage_runtime.telemetry.logs import get_logger

if TYPE_CHECKING:
    from forage_trajectory.trajectory import Group

T = TypeVar("T")
M = TypeVar("M", bound=Message)
REPLICA_SILENCE_S = 60
"""A replica that gave no sign of life for so long is gone."""
LIVELY_S = 15
"""A replica that gave no sign of life for so long may have died; they give one every 5 seconds."""
_CONSUMER_SILENCE_MS = 3_600_000
ENVIRONMENTS_SILENCE_S = 15
"""What a rollout service declared is forgotten so long after its last sign of life."""
ANNOUNCED, SERVED = "announced", "served"
"""Streams with an entry for the last change alone: see `StreamClient.await_change`."""
NEVER = b"0"
_FIELD = b"m"
"""The field of an entry: a message of any other kind."""
RECLAIM_SCAN = 64
_REJECTED_KEPT, _REJECTED_BYTES = 1000, 16_384
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
class Entry(Generic[T]):
    """What was claimed from a stream and is not yet acknowledged."""

    id: bytes
    message: T


@dataclass(frozen=True)
class _Call:
    """A call of `finish`: its name, the group that was given, and its last attempt."""

    name: str
    group: PackedGroup
    tried_at: float


class StreamClient(RunKeys):
    """One run's streams and keys."""

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

    # Prompts: the trainer issues them, the rollout service claims and finishes them.

    @recorded
    def issue(self, prompt: Prompt) -> bool:
        """Put a prompt on the stream; False if its (reply stream, batch, position, attempt) was issued before."""
        stream = prompt.reply_stream or self.trajectories
        keys = [self.prompts, self._issue_table(stream, prompt.batch), self.key("issued")]
        attempt = f"{prompt.position}/{prompt.attempt}"
        batch = str(prompt.batch) if stream == self.trajectories else ""
        return bool(self._run_fenced("issue", keys, attempt, prompt.group_uid, prompt.SerializeToString(), batch))

    def read_issues(self, stream: str, batch: int) -> dict[tuple[int, int], str]:
        """Read the prompts issued for a batch of a reply stream: (position, attempt) → group uid.

        Empty once the batch is over: all its slots are acknowledged.
        """
        table = self._call(self._redis.hgetall, self._issue_table(stream, batch))
        return {_parse_attempt(attempt): value.decode().partition(" ")[2] for attempt, value in table.items()}

    def find_absent(self, stream: str, batch: int) -> set[tuple[int, int]]:
        """The (position, attempt) of a batch whose prompts are not on the stream: each was finished, or is lost."""
        return {_parse_attempt(p) for p in self._run("find_absent", [self.prompts, self._issue_table(stream, batch)])}

    def read_issued(self) -> list[Issue]:
        """Read every prompt that was issued for training, attempts included, in the order of batches."""
        history = {
            int(batch): [line.split(" ", 1) for line in lines.decode().split("\n") if line]
            for batch, lines in self._read_hash("issued").items()
        }
        issues = [Issue(batch, *_parse_attempt(name), uid) for batch, rows in history.items() for name, uid in rows]
        batch = 1
        while batch <= max(history, default=0) or self._call(
            self._redis.exists, self._issue_table(self.trajectories, batch)
        ):
            if batch not in history:
                table = self.read_issues(self.trajectories, batch)
                issues += [Issue(batch, *attempt, uid) for attempt, uid in table.items()]
            batch += 1
        return sorted(issues, key=lambda issue: (issue.batch, issue.position, issue.attempt))

    def read_prompts(self) -> list[Entry[Prompt]]:
        """Read the prompts that are not finished, claimed or not."""
        return self._decode(self.prompts, Prompt, self._call(self._redis.xrange, self.prompts))

    @recorded
    def claim_prompts(self, consumer: str, count: int, block_s: float) -> list[Entry[Prompt]]:
        """Claim new prompts; wait up to `block_s` for the first."""
        return self._claim(self.prompts, Prompt, consumer, count, block_s)

    @recorded
    def take_over_prompts(self, consumer: str, count: int) -> list[Entry[Prompt]]:
        """Read prompts that were claimed under this name, by an earlier process of this worker or this one itself."""
        return self._claim(self.prompts, Prompt, consumer, count, 0.0, "0")

    @recorded
    def reclaim_prompts(self, consumer: str, count: int) -> list[Entry[Prompt]]:
        """Claim prompts of workers that sent no keep-alive for `redis.reclaim_idle_s`."""
        return self._reclaim(self.prompts, Prompt, consumer, count, self._settings.reclaim_idle_s)

    def keep_alive(self, consumer: str, ids: Iterable[bytes]) -> None:
        """Reset the idle time of prompts in progress, so that no other worker reclaims them."""
        if claimed := list(ids):
            self._call(self._redis.xclaim, self.prompts, GROUP, consumer, 0, claimed, justid=True)

    def declare_environments(self, environments: Mapping[str, str]) -> None:
        """Say which environment data sources get from the rollout service; repeat it every few seconds."""
        declared = json.dumps(environments)
        self._run("declare_environments", [self.key("environments")], declared, ENVIRONMENTS_SILENCE_S)

    def read_environments(self) -> dict[str, str] | None:
        """Read data source → environment as the rollout service declared it last; None where none runs."""
        found = self._call(self._redis.get, self.key("environments"))
        return None if found is None else json.loads(found)

    def declare_dtype(self, dtype: str) -> None:
        """Say what an engine computes in, as PyTorch names it; it stays with the run."""
        self._call(self._redis.set, self.key("dtype"), dtype)

    def read_dtype(self) -> str:
        """Read what the engines compute in; empty before any said so."""
        return (self._call(self._redis.get, self.key("dtype")) or b"").decode()

    def read_ledger(self) -> dict[int, LedgerEntry]:
        """Read the ledger: step → the groups it consumed."""
        entries = {int(step): LedgerEntry.FromString(entry) for step, entry in self._read_hash("ledger").items()}
        return dict(sorted(entries.items()))

    def count_backlog(self, stream: str) -> int:
        """Count the entries of a stream that are not acknowledged yet, claimed or not."""
        return int(self._call(self._redis.xlen, stream))

    def measure_bytes(self, stream: str) -> int:
        """Measure the memory that a stream takes in the server."""
        return int(self._call(self._redis.memory_usage, stream, samples=0) or 0)

    def read_byte_limit(self) -> int:
        """Read how many bytes the groups on a stream may take; 0 if neither settings nor server set a limit."""
        limit = self._settings.max_stream_bytes
        return self._read_memory_limit() // 2 if limit is None else limit

    # Groups: the rollout service finishes prompts with them, the trainer claims and acknowledges them.

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

    @recorded
    def reject(self, stream: str, id: bytes, content: bytes) -> None:
        """Remove an entry that nobody can use; its beginning is kept for diagnosis.

        Raises:
            FencedError: this is a trainer, and a later one has taken over.
        """
        keys = [stream, self.key("rejected"), self._stored_table(stream)]
        names = self._run_unless_replaced("reject", keys, GROUP, id, content[:_REJECTED_BYTES], _REJECTED_KEPT)
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

    # The policy: the trainer publishes it, replicas follow.

    @recorded
    def acquire_epoch(self, floor: int = 0) -> int:
        """Acquire an epoch (fencing token) that is higher than any before.

        Args:
            floor: the highest epoch that the trainer's files name: the server may have lost its data.
        """
        self.epoch = int(self._run("acquire_epoch", [self.key("epoch"), self.key("policy")], floor))
        return self.epoch

    @recorded
    def publish(self, policy: Policy) -> None:
        """Publish the policy that replicas must serve, under its epoch."""
        keys = [self.key(name) for name in ("epoch", "policy", ANNOUNCED, SERVED)]
        self._run("publish", keys, policy.epoch, policy.SerializeToString())
        self.epoch = policy.epoch

    def prune(self) -> None:
        """Forget replicas and consumers that are gone."""
        keys = [self.key("replicas"), self.key("alive"), self.prompts, self.trajectories]
        self._run_fenced("prune", keys, GROUP, REPLICA_SILENCE_S, _CONSUMER_SILENCE_MS)

    def read_policy(self) -> Policy | None:
        """Read the policy that was published last."""
        found = self._call(self._redis.hget, self.key("policy"), "m")
        return None if found is None else Policy.FromString(found)

    def acknowledge_policy(self, name: str, replica: Replica) -> None:
        """Record what a replica serves and refuses, as a sign of life too: repeat it every few seconds."""
        keys = [self.key("replicas"), self.key("alive"), self.key(SERVED)]
        self._run("acknowledge_policy", keys, name, replica.SerializeToString())

    def read_replicas(self, silence_s: int = REPLICA_SILENCE_S) -> dict[str, Replica]:
        """Read what each replica serves and refuses, of those that gave a sign of life within `silence_s`."""
        rows = self._run("read_replicas", [self.key("replicas"), self.key("alive")], silence_s)
        return {name.decode(): Replica.FromString(row) for name, row in zip(rows[::2], rows[1::2], strict=True)}

    # Shifts at GPUs that trainer and engines share: the trainer sets whose it is, engines follow.

    def set_shift(self, shift: Shift) -> None:
        """Begin a shift, the trainer's or the engines', under the trainer's epoch.

        Raises:
            FencedError: a later trainer has taken over.
        """
        shift.epoch = self.epoch
        self._run_fenced("set_shift", [self.key("shift"), self.key(ANNOUNCED)], shift.SerializeToString())

    def replace_shift(self, before: Shift, shift: Shift) -> bool:
        """Replace a shift, of whatever trainer; False if it is another one meanwhile."""
        keys, is_new = [self.key("shift"), self.key(ANNOUNCED)], shift.number != before.number
        messages = before.SerializeToString(), shift.SerializeToString()
        return bool(self._run("replace_shift", keys, *messages, int(is_new)))

    def read_shift(self) -> Shift | None:
        """Read whose shift it is; None where no trainer has set one."""
        found = self._call(self._redis.get, self.key("shift"))
        return None if found is None else Shift.FromString(found)

    def await_change(self, stream: str, seen: bytes, block_s: float) -> bytes:
        """Return after a change of what is announced or of the shift (`ANNOUNCED`), or of what is announced or served
        (`SERVED`).

        A time-out looks like a change too: the caller reads the state again, whatever became of the server's data.

        Args:
            seen: the result of the call before; the first one returns at once if there ever was a change.
        """
        found = self._call(self._redis.xread, {self.key(stream): seen}, block=self._to_block_ms(block_s))
        return next((rows[-1][0] for _, rows in found or []), NEVER)  # a server that lost its data counts anew

    def _read_hash(self, name: str) -> dict[str, bytes]:
        return {field.decode(): value for field, value in self._call(self._redis.hgetall, self.key(name)).items()}

    @property
    def _trainer(self) -> str:
        """The trainer's consumer: each has its own, so that an old one cannot take its successor's entries."""
        return f"trainer-{self.epoch}"

    def _issue_table(self, stream: str, batch: int) -> str:
        return self.key(f"issued:{self._shorten(stream)}:{batch}")

    def _stored_table(self, stream: str) -> str:
        """The hash of the files that entries of a stream refer to: entry id → name."""
        return self.key(f"stored:{self._shorten(stream)}")

    def _shorten(self, stream: str) -> str:
        return stream.removeprefix(self._prefix)

    def _claim(self, stream: str, kind: type[M], who: str, count: int, block_s: float, id: str = ">") -> list[Entry[M]]:
        return self._decode(stream, kind, self._read_new(stream, who, count, block_s, id))

    def _read_new(self, stream: str, who: str, count: int, block_s: float, id: str = ">") -> list[Any]:
        block = self._to_block_ms(block_s)
        found = self._call(self._redis.xreadgroup, GROUP, who, {stream: id}, count=count, block=block)
        return [row for _, rows in found or [] for row in rows]

    def _reclaim(self, stream: str, kind: type[M], consumer: str, count: int, idle_s: float) -> list[Entry[M]]:
        entries: list[Entry[M]] = []
        cursor = b"0-0"
        while len(entries) < count:
            idle_ms, wanted = int(idle_s * 1000), min(RECLAIM_SCAN, count - len(entries))
            cursor, rows = self._call(self._redis.xautoclaim, stream, GROUP, consumer, idle_ms, cursor, wanted)[:2]
            entries += self._decode(stream, kind, rows)
            if cursor == b"0-0":
                break
        return entries

    def _decode(self, stream: str, kind: type[M], rows: Sequence[Any]) -> list[Entry[M]]:
        entries = []
        for id, fields in rows:
            try:
                entries.append(Entry(id, kind.FromString(fields[_FIELD])))
            except (DecodeError, KeyError, TypeError):
                self.reject(stream, id, repr(fields).encode())  # no worker could ever finish it
        return entries


def _parse_attempt(name: bytes | str) -> tuple[int, int]:
    """(position, attempt) in a field of an issue table."""
    position, attempt = (name.decode() if isinstance(name, bytes) else name).split("/")
    return int(position), int(attempt)


def _decode_all(packed: Sequence[PackedGroup]) -> list[Group | DecodeError]:
    from forage_trajectory.codec import decode_group  # imports NumPy, which the command needs for nothing else here

    groups: list[Group | DecodeError] = []
    for one in packed:
        try:
            groups.append(decode_group(one))
        except DecodeError as error:
            groups.append(error)
    return groups
