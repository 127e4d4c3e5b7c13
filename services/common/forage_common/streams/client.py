"""The work between services, exactly once: prompts out, trajectory groups back, on Redis streams.

Rules (each kept by one Lua script, which Redis runs atomically and writes to its log as one transaction):

- *issue*: a (batch, position, attempt) enters the prompts stream once, however often it is issued.
- *finish*: a prompt is acknowledged and its group written together, or not at all; of two workers that hold one
  entry the first wins.
- *acknowledge*: the groups of a step leave the stream and enter the ledger together.
- *publish*: a policy replaces the current one unless a trainer with a higher epoch has spoken.

Every script may be repeated after a lost reply, so the client retries through a restart of the server. A worker's
entries go to another (`reclaim`) when it has not called `keep_alive` for a while.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import redis
from google.protobuf.message import DecodeError, Message
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from forage_common.clients.auth import read_token
from forage_common.errors import FencedError, UnavailableError
from forage_common.settings import RedisSettings
from forage_common.v1.trajectory_pb2 import LedgerEntry, Policy, Prompt, TrajectoryGroup

GROUP = "forage"
_FIELD = b"m"
_RECLAIM_SCAN = 64
M = TypeVar("M", bound=Message)

_ISSUE = """
if redis.call('HSETNX', KEYS[2], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('XADD', KEYS[1], '*', 'm', ARGV[3])
return 1
"""
_FINISH = """
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('XDEL', KEYS[1], ARGV[2])
redis.call('XADD', KEYS[2], '*', 'm', ARGV[3])
return 1
"""
_ACKNOWLEDGE = """
redis.call('HSETNX', KEYS[2], ARGV[2], ARGV[3])
for i = 4, #ARGV do
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
  redis.call('XDEL', KEYS[1], ARGV[i])
end
return 1
"""
_PUBLISH = """
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
if tonumber(ARGV[1]) < epoch then return epoch end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'm', ARGV[2])
return -1
"""


@dataclass(frozen=True)
class Entry(Generic[M]):
    """A message taken from a stream and not yet acknowledged."""

    id: bytes
    message: M


class StreamClient:
    """One run's streams and keys. Thread-safe; every call is bounded in time.

    Raises `UnavailableError` from any call when the server stays away for about `patience_s`.

    Raises:
        SettingsError: the file with the password cannot be read, or holds none.
    """

    def __init__(self, settings: RedisSettings, run_id: str, patience_s: float = 60.0) -> None:
        retries = max(1, int(patience_s / 2))
        file = settings.password_file
        self._redis = redis.Redis.from_url(
            settings.url,
            password=read_token(file, "redis.password_file") if file else None,
            socket_timeout=settings.timeout_s,
            socket_connect_timeout=settings.timeout_s,
            retry=Retry(ExponentialWithJitterBackoff(cap=2.0, base=0.05), retries),
            retry_on_error=[redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError],
        )
        self._settings = settings
        self._prefix = f"forage:{run_id}:"
        self.prompts = self.key("prompts")
        self.trajectories = self.key("trajectories")
        self._issue = self._redis.register_script(_ISSUE)
        self._finish = self._redis.register_script(_FINISH)
        self._acknowledge = self._redis.register_script(_ACKNOWLEDGE)
        self._publish = self._redis.register_script(_PUBLISH)

    def key(self, name: str) -> str:
        """The full name of one of the run's keys."""
        return self._prefix + name

    def ping(self) -> bool:
        return bool(self._call(self._redis.ping))

    def create_groups(self, *streams: str) -> None:
        """Make the consumer group of each stream, from its beginning; what exists is left alone."""
        for stream in streams or (self.prompts, self.trajectories):
            try:
                self._call(self._redis.xgroup_create, stream, GROUP, id="0", mkstream=True)
            except redis.ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    # Prompts: the trainer issues, the rollout service takes and finishes.

    def issue(self, prompt: Prompt) -> bool:
        """Put a prompt on the stream unless this (purpose, batch, position, attempt) was issued before."""
        name = f"{prompt.purpose}/{prompt.batch}/{prompt.position}/{prompt.attempt}"
        keys = [self.prompts, self.key("issued")]
        return bool(self._call(self._issue, keys=keys, args=[name, prompt.group_uid, prompt.SerializeToString()]))

    def read_issued(self) -> dict[str, str]:
        """Everything ever issued: "purpose/batch/position/attempt" → group uid."""
        found = cast(dict[bytes, bytes], self._call(self._redis.hgetall, self.key("issued")))
        return {k.decode(): v.decode() for k, v in found.items()}

    def claim_prompts(self, consumer: str, count: int, block_s: float) -> list[Entry[Prompt]]:
        """New prompts, waiting up to `block_s` for the first."""
        return self._take(self.prompts, Prompt, consumer, count, block_s)

    def reclaim_prompts(self, consumer: str, count: int) -> list[Entry[Prompt]]:
        """Prompts whose worker has been silent for `redis.reclaim_idle_s`."""
        return self._reclaim(self.prompts, Prompt, consumer, count, self._settings.reclaim_idle_s)

    def keep_alive(self, consumer: str, ids: Iterable[bytes]) -> None:
        """Tell the server that these prompts are being worked on."""
        held = list(ids)
        if held:
            self._call(self._redis.xclaim, self.prompts, GROUP, consumer, 0, held, justid=True)

    def finish(self, entry: Entry[Prompt], group: TrajectoryGroup) -> bool:
        """Acknowledge a prompt and write its group, atomically. False: another worker had finished it."""
        keys = [self.prompts, entry.message.reply_stream or self.trajectories]
        return bool(self._call(self._finish, keys=keys, args=[GROUP, entry.id, group.SerializeToString()]))

    # Groups: the rollout service writes, the trainer takes and acknowledges.

    def claim_groups(self, stream: str, consumer: str, count: int, block_s: float) -> list[Entry[TrajectoryGroup]]:
        """New groups, waiting up to `block_s` for the first."""
        return self._take(stream, TrajectoryGroup, consumer, count, block_s)

    def reclaim_groups(self, stream: str, consumer: str, count: int) -> list[Entry[TrajectoryGroup]]:
        """Groups that an earlier life of the consumer took and did not acknowledge."""
        return self._reclaim(stream, TrajectoryGroup, consumer, count, 0.0)

    def acknowledge(self, ledger: LedgerEntry, ids: Sequence[bytes]) -> None:
        """Remove a step's groups from the stream and record the step in the ledger, atomically."""
        args = [GROUP, str(ledger.step), ledger.SerializeToString(), *ids]
        self._call(self._acknowledge, keys=[self.trajectories, self.key("ledger")], args=args)

    def discard(self, stream: str, ids: Sequence[bytes]) -> None:
        """Remove groups that nobody will train on (stale, or of a validation that is over)."""
        if ids:
            self._call(self._redis.xack, stream, GROUP, *ids)
            self._call(self._redis.xdel, stream, *ids)

    def read_ledger(self) -> dict[int, LedgerEntry]:
        """Step → what it ate."""
        found = cast(dict[bytes, bytes], self._call(self._redis.hgetall, self.key("ledger")))
        return {int(k): LedgerEntry.FromString(v) for k, v in sorted(found.items(), key=lambda kv: int(kv[0]))}

    def count_backlog(self, stream: str) -> int:
        """Entries on a stream that are not acknowledged yet, delivered or not."""
        return int(cast(int, self._call(self._redis.xlen, stream)))

    def delete(self, *names: str) -> None:
        """Delete streams or keys by full name."""
        if names:
            self._call(self._redis.delete, *names)

    # The policy: the trainer publishes, replicas follow.

    def acquire_epoch(self) -> int:
        """A fencing token higher than any before."""
        return int(cast(int, self._call(self._redis.incr, self.key("epoch"))))

    def publish(self, policy: Policy) -> None:
        """Announce the policy that replicas must serve.

        Raises:
            FencedError: a trainer with a higher epoch has published.
        """
        found = int(
            cast(
                int,
                self._call(self._publish, keys=[self.key("policy")], args=[policy.epoch, policy.SerializeToString()]),
            )
        )
        if found >= 0:
            raise FencedError(f"epoch {policy.epoch} is over: a trainer with epoch {found} has taken over this run")

    def read_policy(self) -> Policy | None:
        """The policy last announced."""
        found = self._call(self._redis.hget, self.key("policy"), "m")
        return None if found is None else Policy.FromString(cast(bytes, found))

    def acknowledge_policy(self, replica: str, policy: Policy) -> None:
        """Record which policy a replica serves."""
        self._call(self._redis.hset, self.key("replicas"), replica, policy.SerializeToString())

    def read_replicas(self) -> dict[str, Policy]:
        """Replica → the policy it serves."""
        found = cast(dict[bytes, bytes], self._call(self._redis.hgetall, self.key("replicas")))
        return {k.decode(): Policy.FromString(v) for k, v in found.items()}

    def _take(self, stream: str, kind: type[M], consumer: str, count: int, block_s: float) -> list[Entry[M]]:
        # The block stays below the socket's time limit, else an idle wait looks like a dead server.
        block_ms = max(1, int(min(block_s, self._settings.timeout_s / 2) * 1000))
        found = self._call(self._redis.xreadgroup, GROUP, consumer, {stream: ">"}, count=count, block=block_ms)
        return [entry for _, rows in cast(list[Any], found or []) for entry in self._decode(stream, kind, rows)]

    def _reclaim(self, stream: str, kind: type[M], consumer: str, count: int, idle_s: float) -> list[Entry[M]]:
        entries: list[Entry[M]] = []
        cursor = b"0-0"
        while len(entries) < count:
            want = min(_RECLAIM_SCAN, count - len(entries))
            reply = self._call(
                self._redis.xautoclaim,
                stream,
                GROUP,
                consumer,
                int(idle_s * 1000),
                start_id=cursor,
                count=want,
            )
            cursor, rows = cast(tuple[bytes, list[Any]], reply)[:2]
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
                # Not ours: nobody could ever finish it. Kept aside for a person to look at.
                self._call(
                    self._redis.xadd,
                    self.key("rejected"),
                    {"stream": stream, "fields": repr(fields)},
                    maxlen=1000,
                )
                self.discard(stream, [id])
        return entries

    def _call(self, command: Any, *args: Any, **kwargs: Any) -> Any:
        deadline = time.monotonic() + self._settings.timeout_s
        while True:
            try:
                return command(*args, **kwargs)
            except (redis.ConnectionError, redis.TimeoutError) as error:
                where = self._redis.connection_pool.connection_kwargs
                raise UnavailableError(
                    f"no answer from Redis at {where.get('host')}:{where.get('port')} ({error}): is it running?"
                ) from error
            except redis.ResponseError as error:
                # A server that lost its data (no append-only file) forgets the groups; make them again.
                if "NOGROUP" not in str(error) or time.monotonic() > deadline:
                    raise
                self.create_groups()
                time.sleep(0.1)
