"""Prompts from trainer to rollout and trajectory groups back, each exactly once, on Redis streams.

Rules (one Lua script each in `scripts/`, which Redis runs atomically and logs as one transaction):

- *issue*: a (batch, position, attempt) enters the prompts stream once, however often it is issued.
- *finish*: a prompt is acknowledged and its group written together, or neither; if two workers claim one entry, the
  first to finish wins. Groups are packed (`packing`); of a large one the entry has a reference to a file (`payloads`).
- *acknowledge*: the groups of a step leave the stream, and the step enters the ledger, together.
- *publish*: a policy replaces the current one; *set shift*: so does a shift at shared GPUs.

Every script of the trainer carries its epoch and is refused once a later trainer has acquired one. Every script is
idempotent, so the client can retry after a lost reply and through a restart of the server. Every script runs on a
server that is out of memory too: refusing one could block the call that frees memory. The dispatcher's back-pressure
bounds what the streams hold. The entries of a worker that stops calling `keep_alive` are reclaimed by another worker.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from forage_proto.v1.trajectory_pb2 import LedgerEntry, Policy, Prompt, Replica, Shift
from forage_queue.streams.entries import Entry
from forage_queue.streams.groups import VALIDATION, GroupStreams
from forage_queue.streams.history import recorded
from forage_queue.streams.prompt_identity import Issue
from forage_queue.streams.run_keys import GROUP

__all__ = [
    "ANNOUNCED",
    "ENVIRONMENTS_SILENCE_S",
    "GROUP",
    "LIVELY_S",
    "NEVER",
    "REPLICA_SILENCE_S",
    "SERVED",
    "VALIDATION",
    "Entry",
    "StreamClient",
]
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


class StreamClient(GroupStreams):
    """One run's streams and keys."""

    # Prompts: the trainer issues them, the rollout service claims and finishes them.

    @recorded
    def issue(self, prompt: Prompt) -> bool:
        """Put a prompt on the stream; False if its (reply stream, batch, position, attempt) was issued before."""
        stream = prompt.reply_stream or self.trajectories
        keys = [self.prompts, self._issue_table(stream, prompt.batch), self.key("issued")]
        place = f"{prompt.position}/{prompt.attempt}"
        batch = str(prompt.batch) if stream == self.trajectories else ""
        return bool(self._run_fenced("issue", keys, place, prompt.group_uid, prompt.SerializeToString(), batch))

    def read_issues(self, stream: str, batch: int) -> dict[tuple[int, int], str]:
        """Read the prompts issued for a batch of a reply stream: (position, attempt) → group uid.

        Empty once the batch is over: all its places are acknowledged.
        """
        table = self._call(self._redis.hgetall, self._issue_table(stream, batch))
        return {_parse_place(place): value.decode().partition(" ")[2] for place, value in table.items()}

    def find_absent(self, stream: str, batch: int) -> set[tuple[int, int]]:
        """The (position, attempt) of a batch whose prompts are not on the stream: each was finished, or is lost."""
        return {_parse_place(p) for p in self._run("find_absent", [self.prompts, self._issue_table(stream, batch)])}

    def read_issued(self) -> list[Issue]:
        """Read every prompt that was issued for training, attempts included, in the order of batches."""
        history = {
            int(batch): [line.split(" ", 1) for line in lines.decode().split("\n") if line]
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


def _parse_place(place: bytes | str) -> tuple[int, int]:
    text = place.decode() if isinstance(place, bytes) else place
    position, attempt = text.split("/")
    return int(position), int(attempt)
