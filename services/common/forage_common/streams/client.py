"""Prompts from trainer to rollout and trajectory groups back, each exactly once, on Redis streams.

Rules (one Lua script each, which Redis runs atomically and logs as one transaction):

- *issue*: a (batch, position, attempt) enters the prompts stream once, however often it is issued.
- *finish*: a prompt is acknowledged and its group written together, or neither; if two workers claim one entry, the
  first to finish wins.
- *acknowledge*: the groups of a step leave the stream, and the step enters the ledger, together.
- *publish*: a policy replaces the current one unless a trainer with a higher epoch has published.

Every script is idempotent, so the client can retry after a lost reply and through a restart of the server. The entries
of a worker that stops calling `keep_alive` are reclaimed by another worker.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import redis
from google.protobuf.message import DecodeError, Message

from forage_common.errors import FencedError
from forage_common.settings import RedisSettings
from forage_common.streams.connection import connect, name_server, translate_error
from forage_common.v1.trajectory_pb2 import LedgerEntry, Policy, Prompt, TrajectoryGroup

GROUP = "forage"
_FIELD = b"m"
_RECLAIM_SCAN = 64
M = TypeVar("M", bound=Message)

# HSETNX is the test whether the prompt was issued before: the stream itself forgets acknowledged entries.
_ISSUE = """
if redis.call('HSETNX', KEYS[2], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('XADD', KEYS[1], '*', 'm', ARGV[3])
return 1
"""
# XACK counts 0 when another worker has finished the entry: its group must not be written twice.
_FINISH = """
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('XDEL', KEYS[1], ARGV[2])
redis.call('XADD', KEYS[2], '*', 'm', ARGV[3])
return 1
"""
# The ledger keeps the first record of a step, so a repeated call changes nothing.
_ACKNOWLEDGE = """
redis.call('HSETNX', KEYS[2], ARGV[2], ARGV[3])
for i = 4, #ARGV do
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
  redis.call('XDEL', KEYS[1], ARGV[i])
end
return 1
"""
# The epoch fences off a trainer that was replaced and does not know it yet.
_PUBLISH = """
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
if tonumber(ARGV[1]) < epoch then return epoch end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'm', ARGV[2])
return -1
"""


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

    def __init__(self, settings: RedisSettings, run_id: str, patience_s: float = 60.0) -> None:
        self._redis = connect(settings, patience_s, f"forage:{{{run_id}}}:")
        self._settings = settings
        self._prefix = f"forage:{run_id}:"
        self.prompts = self.key("prompts")
        self.trajectories = self.key("trajectories")
        self._issue = self._redis.register_script(_ISSUE)
        self._finish = self._redis.register_script(_FINISH)
        self._acknowledge = self._redis.register_script(_ACKNOWLEDGE)
        self._publish = self._redis.register_script(_PUBLISH)

    def key(self, name: str) -> str:
        """The full name of a key of the run."""
        return self._prefix + name

    def ping(self) -> bool:
        return bool(self._call(self._redis.ping))

    def create_groups(self, *streams: str) -> None:
        """Create the consumer group of each stream, from its beginning, unless it exists."""
        for stream in streams or (self.prompts, self.trajectories):
            try:
                self._call(self._redis.xgroup_create, stream, GROUP, id="0", mkstream=True)
            except redis.ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    # Prompts: the trainer issues them, the rollout service claims and finishes them.

    def issue(self, prompt: Prompt) -> bool:
        """Put a prompt on the stream; False if its (purpose, batch, position, attempt) was issued before."""
        name = f"{prompt.purpose}/{prompt.batch}/{prompt.position}/{prompt.attempt}"
        keys = [self.prompts, self.key("issued")]
        return bool(self._call(self._issue, keys=keys, args=[name, prompt.group_uid, prompt.SerializeToString()]))

    def read_issued(self) -> dict[str, str]:
        """Read all prompts ever issued: "purpose/batch/position/attempt" → group uid."""
        return {name: uid.decode() for name, uid in self._read_hash("issued").items()}

    def claim_prompts(self, consumer: str, count: int, block_s: float) -> list[Entry[Prompt]]:
        """Claim new prompts; wait up to `block_s` for the first."""
        return self._claim(self.prompts, Prompt, consumer, count, block_s)

    def reclaim_prompts(self, consumer: str, count: int) -> list[Entry[Prompt]]:
        """Claim prompts of workers that sent no keep-alive for `redis.reclaim_idle_s`."""
        return self._reclaim(self.prompts, Prompt, consumer, count, self._settings.reclaim_idle_s)

    def keep_alive(self, consumer: str, ids: Iterable[bytes]) -> None:
        """Reset the idle time of prompts in progress, so that no other worker reclaims them."""
        claimed = list(ids)
        if claimed:
            self._call(self._redis.xclaim, self.prompts, GROUP, consumer, 0, claimed, justid=True)

    def finish(self, entry: Entry[Prompt], group: TrajectoryGroup) -> bool:
        """Acknowledge a prompt and write its group, atomically; False if another worker has finished it."""
        keys = [self.prompts, entry.message.reply_stream or self.trajectories]
        return bool(self._call(self._finish, keys=keys, args=[GROUP, entry.id, group.SerializeToString()]))

    # Groups: the rollout service writes them, the trainer claims and acknowledges them.

    def claim_groups(self, stream: str, consumer: str, count: int, block_s: float) -> list[Entry[TrajectoryGroup]]:
        """Claim new groups; wait up to `block_s` for the first."""
        return self._claim(stream, TrajectoryGroup, consumer, count, block_s)

    def reclaim_groups(self, stream: str, consumer: str, count: int) -> list[Entry[TrajectoryGroup]]:
        """Claim again the groups that an earlier process of this consumer claimed and did not acknowledge."""
        return self._reclaim(stream, TrajectoryGroup, consumer, count, 0.0)

    def acknowledge(self, ledger: LedgerEntry, ids: Sequence[bytes]) -> None:
        """Remove a step's groups from the stream and record the step in the ledger, atomically."""
        args = [GROUP, str(ledger.step), ledger.SerializeToString(), *ids]
        self._call(self._acknowledge, keys=[self.trajectories, self.key("ledger")], args=args)

    def discard(self, stream: str, ids: Sequence[bytes]) -> None:
        """Remove groups that are never trained on: stale ones, and those of a finished validation."""
        if ids:
            self._call(self._redis.xack, stream, GROUP, *ids)
            self._call(self._redis.xdel, stream, *ids)

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

    def delete(self, *names: str) -> None:
        """Delete streams or keys by full name."""
        if names:
            self._call(self._redis.delete, *names)

    # The policy: the trainer publishes it, replicas follow.

    def acquire_epoch(self) -> int:
        """Acquire an epoch (fencing token) that is higher than any before."""
        return int(self._call(self._redis.incr, self.key("epoch")))

    def publish(self, policy: Policy) -> None:
        """Publish the policy that replicas must serve.

        Raises:
            FencedError: a trainer with a higher epoch has published.
        """
        args = [policy.epoch, policy.SerializeToString()]
        found = int(self._call(self._publish, keys=[self.key("policy")], args=args))
        if found >= 0:
            raise FencedError(f"epoch {policy.epoch} is over: a trainer with epoch {found} has taken over this run")

    def read_policy(self) -> Policy | None:
        """Read the policy that was published last."""
        found = self._call(self._redis.hget, self.key("policy"), "m")
        return None if found is None else Policy.FromString(found)

    def acknowledge_policy(self, replica: str, policy: Policy) -> None:
        """Record the policy that a replica serves."""
        self._call(self._redis.hset, self.key("replicas"), replica, policy.SerializeToString())

    def read_replicas(self) -> dict[str, Policy]:
        """Read replica → the policy that it serves."""
        return {replica: Policy.FromString(policy) for replica, policy in self._read_hash("replicas").items()}

    def _read_hash(self, name: str) -> dict[str, bytes]:
        return {field.decode(): value for field, value in self._call(self._redis.hgetall, self.key(name)).items()}

    def _claim(self, stream: str, kind: type[M], consumer: str, count: int, block_s: float) -> list[Entry[M]]:
        # Blocking stays below the socket's timeout: else an idle wait looks like a dead server.
        block_ms = max(1, int(min(block_s, self._settings.timeout_s / 2) * 1000))
        found = self._call(self._redis.xreadgroup, GROUP, consumer, {stream: ">"}, count=count, block=block_ms)
        return [entry for _, rows in found or [] for entry in self._decode(stream, kind, rows)]

    def _reclaim(self, stream: str, kind: type[M], consumer: str, count: int, idle_s: float) -> list[Entry[M]]:
        entries: list[Entry[M]] = []
        cursor = b"0-0"
        while len(entries) < count:
            wanted = min(_RECLAIM_SCAN, count - len(entries))
            idle_ms = int(idle_s * 1000)
            reply = self._call(self._redis.xautoclaim, stream, GROUP, consumer, idle_ms, start_id=cursor, count=wanted)
            cursor, rows = reply[:2]
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
                # No worker could ever finish it. A copy is kept for diagnosis.
                fields = {"stream": stream, "fields": repr(fields)}
                self._call(self._redis.xadd, self.key("rejected"), fields, maxlen=1000)
                self.discard(stream, [id])
        return entries

    def _call(self, command: Any, *args: Any, **kwargs: Any) -> Any:
        deadline = time.monotonic() + self._settings.timeout_s
        while True:
            try:
                return command(*args, **kwargs)
            except redis.RedisError as error:
                # A server that lost its data (no append-only file) has lost the consumer groups too: create them.
                if "NOGROUP" in str(error) and time.monotonic() < deadline:
                    self.create_groups()
                    time.sleep(0.1)
                    continue
                typed = translate_error(error, name_server(self._settings), self._read_memory_limit)
                if typed is None:
                    raise
                raise typed from error

    def _read_memory_limit(self) -> int:
        return int(self._call(self._redis.info, "memory")["maxmemory"])
