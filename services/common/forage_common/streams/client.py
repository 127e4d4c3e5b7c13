"""Prompts from trainer to rollout and trajectory groups back, each exactly once, on Redis streams.

Rules (one Lua script each in `scripts/`, which Redis runs atomically and logs as one transaction):

- *issue*: a (batch, position, attempt) enters the prompts stream once, however often it is issued.
- *finish*: a prompt is acknowledged and its group written together, or neither; if two workers claim one entry, the
  first to finish wins.
- *acknowledge*: the groups of a step leave the stream, and the step enters the ledger, together.
- *publish*: a policy replaces the current one; *set shift*: so does a shift at shared GPUs.

Every script of the trainer carries its epoch and is refused once a later trainer has acquired one. Every script is
idempotent, so the client can retry after a lost reply and through a restart of the server. Every script runs on a
server that is out of memory too: refusing one could block the call that frees memory. The dispatcher's back-pressure
bounds what the streams hold. The entries of a worker that stops calling `keep_alive` are reclaimed by another worker.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from forage_common.streams.history import recorded
from forage_common.streams.prompt_identity import Issue
from forage_common.streams.run_keys import GROUP, RunKeys
from forage_common.v1.trajectory_pb2 import LedgerEntry, Policy, Prompt, Replica, Shift, TrajectoryGroup

_FIELD = b"m"
_RECLAIM_SCAN = 64
_PENDING_PAGE = 1000
_REJECTED_KEPT, _REJECTED_BYTES = 1000, 16_384
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
VALIDATION = "validation-"
"""Begins the names of the streams to which groups of validations are written."""
M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Entry(Generic[M]):
    """A message claimed from a stream and not yet acknowledged."""

    id: bytes
    message: M


class StreamClient(RunKeys):
    """One run's streams and keys."""

    def open_replies(self, stream: str, batch: int) -> None:
        """Create a reply stream; if it did not exist, what was issued for it is issued again."""
        self._run("create_group", [stream, self._issue_table(stream, batch)], GROUP)

    def is_reply_stream(self, name: str) -> bool:
        """Whether groups of this run may be written to a key that a prompt names; empty: that of trajectories."""
        return name in ("", self.trajectories) or name.startswith(self.key(VALIDATION))

    @recorded
    def close_replies(self, stream: str, batch: int) -> None:
        """Delete a reply stream and the table of what was issued for it.

        Raises:
            FencedError: a later trainer has taken over; so do `issue`, `reclaim_groups`, `acknowledge`, `discard`,
                `prune` and `publish`.
        """
        self._run_fenced("close_stream", [stream, self._issue_table(stream, batch)])

    # Prompts: the trainer issues them, the rollout service claims and finishes them.

    @recorded
    def issue(self, prompt: Prompt) -> bool:
        """Put a prompt on the stream; False if its (reply stream, batch, position, attempt) was issued before."""
        stream = prompt.reply_stream or self.trajectories
        keys = [self.prompts, self._issue_table(stream, prompt.batch), self.key("ledger")]
        place = f"{prompt.position}/{prompt.attempt}"
        step = str(prompt.batch) if stream == self.trajectories else ""
        return bool(self._run_fenced("issue", keys, place, prompt.group_uid, prompt.SerializeToString(), step))

    def read_issues(self, stream: str, batch: int) -> dict[tuple[int, int], str]:
        """Read the prompts issued for a batch of a reply stream: (position, attempt) → group uid.

        Empty once the batch is acknowledged.
        """
        table = self._call(self._redis.hgetall, self._issue_table(stream, batch))
        return {_parse_place(place): value.decode().partition(" ")[2] for place, value in table.items()}

    def find_absent(self, stream: str, batch: int) -> set[tuple[int, int]]:
        """The (position, attempt) of a batch whose prompts are not on the stream: each was finished, or is lost."""
        return {_parse_place(p) for p in self._run("find_absent", [self.prompts, self._issue_table(stream, batch)])}

    def read_issued(self) -> list[Issue]:
        """Read every prompt that was issued for training, attempts included, in the order of batches."""
        history = {
            int(batch): [line.split(" ", 1) for line in lines.decode().split("\n")]
            for batch, lines in self._read_hash("issued").items()
        }
        issues = [Issue(batch, *_parse_place(place), uid) for batch, rows in history.items() for place, uid in rows]
        batch = 1
        while batch <= max(history, default=0) or self._call(
            self._redis.exists, self._issue_table(self.trajectories, batch)
        ):
            if batch not in history:
                table = self.read_issues(self.trajectories, batch)
                issues += [Issue(batch, *place, uid) for place, uid in table.items()]
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

    @recorded
    def finish(self, entry: Entry[Prompt], group: TrajectoryGroup) -> bool:
        """Acknowledge a prompt and write its group, atomically.

        False if another worker has finished it, or nobody waits for the group any more.
        """
        keys = [self.prompts, entry.message.reply_stream or self.trajectories, self.trajectories]
        return int(self._run("finish", keys, GROUP, entry.id, group.SerializeToString())) == 1

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

    # Groups: the rollout service writes them, the trainer claims and acknowledges them.

    @recorded
    def claim_groups(self, stream: str, count: int, block_s: float) -> list[Entry[TrajectoryGroup]]:
        """Claim new groups; wait up to `block_s` for the first.

        Raises:
            FencedError: a later trainer has taken over. It reclaims what was claimed here.
        """
        entries = self._claim(stream, TrajectoryGroup, self._trainer, count, block_s)
        self.check_epoch()
        return entries

    @recorded
    def reclaim_groups(self, stream: str, known: Collection[bytes]) -> list[Entry[TrajectoryGroup]]:
        """Claim groups that are claimed and not acknowledged, except those that the caller knows.

        They were claimed by an earlier process of the trainer, or their delivery to this one was lost.
        """
        entries: list[Entry[TrajectoryGroup]] = []
        begin = "-"
        while page := self._call(self._redis.xpending_range, stream, GROUP, begin, "+", _PENDING_PAGE):
            ids = [row["message_id"] for row in page if row["message_id"] not in known]
            for i in range(0, len(ids), _RECLAIM_SCAN):
                rows = self._run_fenced("reclaim", [stream], GROUP, self._trainer, *ids[i : i + _RECLAIM_SCAN])
                pairs = [(id, dict(zip(f[::2], f[1::2], strict=True))) for id, f in filter(None, rows)]
                entries += self._decode(stream, TrajectoryGroup, pairs)
            begin = "(" + page[-1]["message_id"].decode()
        return entries

    @recorded
    def acknowledge(self, ledger: LedgerEntry, ids: Sequence[bytes]) -> None:
        """Remove a step's groups from the stream and record the step in the ledger, atomically."""
        table = self._issue_table(self.trajectories, ledger.step)
        keys = [self.trajectories, self.key("ledger"), table, self.key("issued")]
        self._run_fenced("acknowledge", keys, GROUP, str(ledger.step), ledger.SerializeToString(), *ids)

    @recorded
    def discard(self, stream: str, ids: Sequence[bytes]) -> None:
        """Remove groups that are never trained on, stale or superseded ones, or the prompts of such groups."""
        self._run_fenced("discard", [stream], GROUP, *ids)

    @recorded
    def reject(self, stream: str, id: bytes, content: bytes) -> None:
        """Remove an entry that nobody can use; its beginning is kept for diagnosis."""
        self._run("reject", [stream, self.key("rejected")], GROUP, id, content[:_REJECTED_BYTES], _REJECTED_KEPT)

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

    @property
    def _trainer(self) -> str:
        """The trainer's consumer: each has its own, so that an old one cannot take its successor's entries."""
        return f"trainer-{self.epoch}"

    def _issue_table(self, stream: str, batch: int) -> str:
        return self.key(f"issued:{stream.removeprefix(self._prefix)}:{batch}")

    def _read_hash(self, name: str) -> dict[str, bytes]:
        return {field.decode(): value for field, value in self._call(self._redis.hgetall, self.key(name)).items()}

    def _claim(self, stream: str, kind: type[M], who: str, count: int, block_s: float, id: str = ">") -> list[Entry[M]]:
        block = self._to_block_ms(block_s)
        found = self._call(self._redis.xreadgroup, GROUP, who, {stream: id}, count=count, block=block)
        return [entry for _, rows in found or [] for entry in self._decode(stream, kind, rows)]

    def _reclaim(self, stream: str, kind: type[M], consumer: str, count: int, idle_s: float) -> list[Entry[M]]:
        entries: list[Entry[M]] = []
        cursor = b"0-0"
        while len(entries) < count:
            idle_ms, wanted = int(idle_s * 1000), min(_RECLAIM_SCAN, count - len(entries))
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


def _parse_place(place: bytes | str) -> tuple[int, int]:
    text = place.decode() if isinstance(place, bytes) else place
    position, attempt = text.split("/")
    return int(position), int(attempt)
