"""Prompts from trainer to rollout and trajectory groups back, each exactly once, on Redis streams.

Rules (one Lua script each in `scripts/`, which Redis runs atomically and logs as one transaction):

- *issue*: a (batch, position, attempt) enters the prompts stream once, however often it is issued.
- *finish*: a prompt is acknowledged and its group written together, or neither; if two workers claim one entry, the
  first to finish wins.
- *acknowledge*: the groups of a step leave the stream, and the step enters the ledger, together.
- *publish*: a policy replaces the current one.

Every script of the trainer carries its epoch and is refused once a later trainer has acquired one. Every script is
idempotent, so the client can retry after a lost reply and through a restart of the server. Every script runs on a
server that is out of memory too: refusing one could block the call that frees memory. The dispatcher's back-pressure
bounds what the streams hold. The entries of a worker that stops calling `keep_alive` are reclaimed by another worker.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import redis
from google.protobuf.message import DecodeError, Message

from forage_common.errors import FencedError, SettingsError
from forage_common.settings import RedisSettings
from forage_common.streams.connection import connect, name_server, translate_error
from forage_common.streams.history import History, recorded
from forage_common.streams.script_files import read_script
from forage_common.v1.trajectory_pb2 import LedgerEntry, Policy, Prompt, TrajectoryGroup

GROUP = "forage"
_FIELD = b"m"
_NO_GROUP = re.compile(r"No such key '([^']+)'")  # names the stream; the keys of a script are not all streams
_RECLAIM_SCAN = 64
_PENDING_PAGE = 1000
_REJECTED_KEPT, _REJECTED_BYTES = 1000, 16_384
REPLICA_SILENCE_S = 60
"""A replica that gave no sign of life for so long is gone."""
_CONSUMER_SILENCE_MS = 3_600_000
ENVIRONMENTS_SILENCE_S = 15
"""What a rollout service declared is forgotten so long after its last sign of life."""
M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Issue:
    """A prompt that was issued. attempt: 0 at first, one more each time that its position is issued again."""

    batch: int
    position: int
    attempt: int
    group_uid: str


@dataclass(frozen=True)
class Entry(Generic[M]):
    """A message claimed from a stream and not yet acknowledged."""

    id: bytes
    message: M


class StreamClient:
    """One run's streams and keys. Thread-safe; every call is bounded in time.

    Every call raises `UnavailableError` if the server is unavailable for about `patience_s`.

    Raises:
        SettingsError: the file with the password cannot be read, or is empty; the server refuses the credentials.
    """

    def __init__(
        self, settings: RedisSettings, run_id: str, patience_s: float = 60.0, history: History | None = None
    ) -> None:
        self._redis = connect(settings, patience_s, f"forage:{{{run_id}}}:")
        self._settings = settings
        # The braces put all keys of a run on one node of a cluster, as scripts over several keys need it.
        self._prefix = f"forage:{{{run_id}}}:"
        self.prompts = self.key("prompts")
        self.trajectories = self.key("trajectories")
        self._scripts: dict[str, Any] = {}
        self.history = history
        self.epoch = 0
        """That of the trainer which uses this client, once it has acquired one."""

    def key(self, name: str) -> str:
        """The full name of a key of the run."""
        return self._prefix + name

    def ping(self) -> bool:
        return bool(self._call(self._redis.ping))

    def create_groups(self, *streams: str) -> None:
        """Create the consumer group of each stream, from its beginning, unless it exists."""
        for stream in streams or (self.prompts, self.trajectories):
            self._run("create_group", [stream], GROUP)

    def open_replies(self, stream: str, batch: int) -> None:
        """Create a reply stream; if it did not exist, what was issued for it is issued again."""
        self._run("create_group", [stream, self._issue_table(stream, batch)], GROUP)

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

    def read_server(self, section: str) -> dict[str, Any]:
        """Read a section of what the server says about itself (INFO)."""
        return dict(self._call(self._redis.info, section))

    def read_option(self, name: str) -> str | None:
        """Read an option of the server's configuration; None where it does not tell, as many managed servers."""
        try:
            value: str | None = self._call(self._redis.config_get, name).get(name)
        except (SettingsError, redis.ResponseError):
            return None
        return value

    # The policy: the trainer publishes it, replicas follow.

    @recorded
    def acquire_epoch(self, floor: int = 0) -> int:
        """Acquire an epoch (fencing token) that is higher than any before.

        Args:
            floor: the highest epoch that the trainer's files name: the server may have lost its data.
        """
        self.epoch = int(self._run("acquire_epoch", [self.key("epoch"), self.key("policy")], floor))
        return self.epoch

    def check_epoch(self) -> None:
        """
        Raises:
            FencedError: a later trainer has taken over.
        """
        latest = int(self._call(self._redis.get, self.key("epoch")) or 0)
        if latest > self.epoch:
            raise _make_fenced_error(latest)

    @recorded
    def publish(self, policy: Policy) -> None:
        """Publish the policy that replicas must serve, under its epoch."""
        self._run("publish", [self.key("epoch"), self.key("policy")], policy.epoch, policy.SerializeToString())
        self.epoch = policy.epoch

    def prune(self) -> None:
        """Forget replicas and consumers that are gone."""
        keys = [self.key("replicas"), self.key("alive"), self.prompts, self.trajectories]
        self._run_fenced("prune", keys, GROUP, REPLICA_SILENCE_S, _CONSUMER_SILENCE_MS)

    def read_policy(self) -> Policy | None:
        """Read the policy that was published last."""
        found = self._call(self._redis.hget, self.key("policy"), "m")
        return None if found is None else Policy.FromString(found)

    def acknowledge_policy(self, replica: str, policy: Policy) -> None:
        """Record the policy that a replica serves, as a sign of life too: repeat it every few seconds."""
        self._run("acknowledge_policy", [self.key("replicas"), self.key("alive")], replica, policy.SerializeToString())

    def read_replicas(self, silence_s: int = REPLICA_SILENCE_S) -> dict[str, Policy]:
        """Read replica → the policy that it serves, of those that gave a sign of life within `silence_s`."""
        rows = self._run("read_replicas", [self.key("replicas"), self.key("alive")], silence_s)
        return {name.decode(): Policy.FromString(policy) for name, policy in zip(rows[::2], rows[1::2], strict=True)}

    @property
    def _trainer(self) -> str:
        """The trainer's consumer: each has its own, so that an old one cannot take its successor's entries."""
        return f"trainer-{self.epoch}"

    def _issue_table(self, stream: str, batch: int) -> str:
        return self.key(f"issued:{stream.removeprefix(self._prefix)}:{batch}")

    def _run(self, script: str, keys: Sequence[str], *arguments: Any) -> Any:
        if script not in self._scripts:
            self._scripts[script] = self._redis.register_script(read_script(script))
        try:
            return self._call(self._scripts[script], keys=keys, args=arguments)
        except redis.ResponseError as error:
            if "FENCED" not in str(error):
                raise
            raise _make_fenced_error(int(str(error).split()[-1])) from None

    def _run_fenced(self, script: str, keys: Sequence[str], *arguments: Any) -> Any:
        return self._run(script, [self.key("epoch"), *keys], self.epoch, *arguments)

    def _read_hash(self, name: str) -> dict[str, bytes]:
        return {field.decode(): value for field, value in self._call(self._redis.hgetall, self.key(name)).items()}

    def _claim(self, stream: str, kind: type[M], who: str, count: int, block_s: float, id: str = ">") -> list[Entry[M]]:
        # Below the socket's timeout: else an idle wait looks like a dead server.
        block_ms = int(min(block_s, self._settings.timeout_s / 2) * 1000) or None
        found = self._call(self._redis.xreadgroup, GROUP, who, {stream: id}, count=count, block=block_ms)
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

    def _call(self, command: Any, *args: Any, **kwargs: Any) -> Any:
        for repeated in itertools.count():  # not a deadline: this process may have stood still for long
            try:
                return command(*args, **kwargs)
            except redis.RedisError as error:
                # A server that lost its data (no append-only file) has lost the consumer groups too: create them.
                if "NOGROUP" in str(error) and repeated < 10 * self._settings.timeout_s:
                    self.create_groups(*{self.prompts, self.trajectories, *_NO_GROUP.findall(str(error))})
                    time.sleep(0.1)  # wait: has a time limit, and its caller names it
                    continue
                typed = translate_error(error, name_server(self._settings), self._read_memory_limit)
                if typed is None:
                    raise
                raise typed from error

    def _read_memory_limit(self) -> int:
        return int(self.read_server("memory")["maxmemory"])


def _parse_place(place: bytes | str) -> tuple[int, int]:
    text = place.decode() if isinstance(place, bytes) else place
    position, attempt = text.split("/")
    return int(position), int(attempt)


def _make_fenced_error(latest: int) -> FencedError:
    return FencedError(f"a later trainer has taken over this run (epoch {latest}): this one must end")
