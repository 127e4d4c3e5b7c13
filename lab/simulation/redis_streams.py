"""The streams of the Redis in memory: their entries, consumer groups and commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import ResponseError

Id = tuple[int, int]
OK = b"OK"


@dataclass
class Pending:
    """A delivered entry that is not acknowledged."""

    consumer: bytes
    delivered_ms: int
    count: int = 1

    def is_idle(self, now_ms: int, least_ms: int) -> bool:
        """Whether it was not touched for so long; a clock that was set back plays no part where 0 is asked for."""
        return not least_ms or now_ms - self.delivered_ms >= least_ms


@dataclass
class Group:
    """A consumer group: the last delivered id, the pending entries, and when each consumer was seen and active."""

    last: Id
    pending: dict[Id, Pending] = field(default_factory=dict)
    consumers: dict[bytes, list[int]] = field(default_factory=dict)

    def see(self, consumer: bytes, now_ms: int, active: bool = False) -> None:
        times = self.consumers.setdefault(consumer, [now_ms, -1])
        times[0] = now_ms
        if active:
            times[1] = now_ms


@dataclass
class Stream:
    entries: dict[Id, list[bytes]] = field(default_factory=dict)
    last: Id = (0, 0)
    groups: dict[bytes, Group] = field(default_factory=dict)


def _parse_id(text: bytes, missing: int = 0) -> Id:
    ms, _, number = text.partition(b"-")
    return int(ms), int(number) if number else missing


def _format_id(id: Id) -> bytes:
    return b"%d-%d" % id


def _parse_bound(text: bytes, is_end: bool) -> tuple[Id, bool]:
    """(id, whether it is left out) of a bound of XRANGE and XPENDING."""
    if text == b"-":
        return (0, 0), False
    if text == b"+":
        return (2**64, 0), False
    return _parse_id(text.removeprefix(b"("), 2**64 if is_end else 0), text.startswith(b"(")


def _within(id: Id, begin: tuple[Id, bool], end: tuple[Id, bool]) -> bool:
    low = id > begin[0] if begin[1] else id >= begin[0]
    return low and (id < end[0] if end[1] else id <= end[0])


class StreamCommands:
    """The commands of streams, for a store that has these members."""

    data: dict[bytes, Any]
    changes: int
    _now_ms: Callable[[], int]
    _get_typed: Callable[..., Any]

    def _find_group(self, key: bytes, name: bytes) -> tuple[Stream, Group]:
        stream = self.data.get(key)
        if not isinstance(stream, Stream) or name not in stream.groups:
            text = f"NOGROUP No such key '{key.decode()}' or consumer group '{name.decode()}'"
            raise ResponseError(text)
        return stream, stream.groups[name]

    def _xadd(self, key: bytes, *args: bytes) -> bytes:
        rest = list(args)
        limit = None
        if rest[0].upper() == b"MAXLEN":
            rest.pop(0)
            if rest[0] in (b"~", b"="):
                rest.pop(0)
            limit = int(rest.pop(0))
        stream: Stream = self._get_typed(key, Stream, create=True)
        assert rest[0] == b"*"
        ms = self._now_ms()
        stream.last = (ms, 0) if ms > stream.last[0] else (stream.last[0], stream.last[1] + 1)
        stream.entries[stream.last] = rest[1:]
        while limit is not None and len(stream.entries) > limit:
            del stream.entries[next(iter(stream.entries))]
        self.changes += 1
        return _format_id(stream.last)

    def _xdel(self, key: bytes, *ids: bytes) -> int:
        entries = self._get_typed(key, Stream).entries
        found = sum(entries.pop(_parse_id(id), None) is not None for id in ids)
        self.changes += found
        return found

    def _xlen(self, key: bytes) -> int:
        return len(self._get_typed(key, Stream).entries)

    def _xrange(self, key: bytes, begin: bytes, end: bytes, *options: bytes) -> list[Any]:
        low, high = _parse_bound(begin, False), _parse_bound(end, True)
        entries = self._get_typed(key, Stream).entries
        found = [[_format_id(id), fields] for id, fields in entries.items() if _within(id, low, high)]
        return found[: int(options[1])] if options else found

    def _xread(self, *args: bytes) -> list[Any] | None:
        *_, key, after = args
        stream: Stream = self._get_typed(key, Stream)
        found = [[_format_id(id), fields] for id, fields in stream.entries.items() if id > _parse_id(after)]
        return [[key, found]] if found else None

    def _require_stream(self, key: bytes) -> None:
        if key not in self.data:
            raise ResponseError(
                "The XGROUP subcommand requires the key to exist. Note that for CREATE you may want to use the "
                "MKSTREAM option to create an empty stream automatically."
            )

    def _xgroup_create(self, key: bytes, name: bytes, id: bytes, *options: bytes) -> bytes:
        if b"MKSTREAM" not in options:
            self._require_stream(key)
        stream: Stream = self._get_typed(key, Stream, create=True)
        if name in stream.groups:
            raise ResponseError("BUSYGROUP Consumer Group name already exists")
        stream.groups[name] = Group(stream.last if id == b"$" else _parse_id(id))
        self.changes += 1
        return OK

    def _xgroup_delconsumer(self, key: bytes, name: bytes, consumer: bytes) -> int:
        self._require_stream(key)
        _, group = self._find_group(key, name)
        held = [id for id, entry in group.pending.items() if entry.consumer == consumer]
        for id in held:
            del group.pending[id]
        group.consumers.pop(consumer, None)
        self.changes += 1
        return len(held)

    def _xreadgroup(self, *args: bytes) -> Any:
        """Without waiting: the client waits."""
        options = [part.upper() for part in args]
        name, consumer = args[1], args[2]
        count = int(args[options.index(b"COUNT") + 1]) if b"COUNT" in options else 10**9
        key, begin = args[-2], args[-1]
        stream, group = self._find_group(key, name)
        now = self._now_ms()
        if begin != b">":
            after = _parse_id(begin)
            held = sorted(id for id, entry in group.pending.items() if entry.consumer == consumer and id > after)
            group.see(consumer, now)
            for id in held[:count]:
                group.pending[id] = Pending(consumer, now, group.pending[id].count + 1)
            return [[key, [[_format_id(id), stream.entries.get(id)] for id in held[:count]]]]
        found = [(id, fields) for id, fields in stream.entries.items() if id > group.last][:count]
        group.see(consumer, now, active=bool(found))
        for id, _ in found:
            group.last = id
            group.pending[id] = Pending(consumer, now)
            self.changes += 1
        return [[key, [[_format_id(id), fields] for id, fields in found]]] if found else None

    def _xack(self, key: bytes, name: bytes, *ids: bytes) -> int:
        stream = self.data.get(key)
        if not isinstance(stream, Stream) or name not in stream.groups:
            return 0
        pending = stream.groups[name].pending
        found = sum(pending.pop(_parse_id(id), None) is not None for id in ids)
        self.changes += found
        return found

    def _xclaim(self, key: bytes, name: bytes, consumer: bytes, idle_ms: bytes, *rest: bytes) -> list[Any]:
        stream, group = self._find_group(key, name)
        ids = [part for part in rest if part[:1].isdigit()]
        justid = b"JUSTID" in rest
        now, claimed = self._now_ms(), []
        group.see(consumer, now)
        for id in map(_parse_id, ids):
            entry = group.pending.get(id)
            if entry is None:
                continue
            if id not in stream.entries:
                del group.pending[id]
                self.changes += 1
            elif entry.is_idle(now, int(idle_ms)):
                group.pending[id] = Pending(consumer, now, entry.count + (not justid))
                claimed.append(_format_id(id) if justid else [_format_id(id), stream.entries[id]])
                group.see(consumer, now, active=True)
                self.changes += 1
        return claimed

    def _xautoclaim(
        self, key: bytes, name: bytes, consumer: bytes, idle_ms: bytes, begin: bytes, *options: bytes
    ) -> list[Any]:
        stream, group = self._find_group(key, name)
        count = int(options[1]) if options else 100
        now, claimed, deleted, scanned = self._now_ms(), [], [], count * 10
        group.see(consumer, now)
        cursor: Id = (0, 0)
        for id in sorted(id for id in group.pending if id >= _parse_id(begin)):
            if not scanned or len(claimed) + len(deleted) >= count:
                cursor = id
                break
            scanned -= 1
            entry = group.pending[id]
            if id not in stream.entries:
                del group.pending[id]
                deleted.append(_format_id(id))
                self.changes += 1
            elif entry.is_idle(now, int(idle_ms)):
                group.pending[id] = Pending(consumer, now, entry.count + 1)
                claimed.append([_format_id(id), stream.entries[id]])
                group.see(consumer, now, active=True)
                self.changes += 1
        return [_format_id(cursor), claimed, deleted]

    def _xpending(self, key: bytes, name: bytes, *rest: bytes) -> list[Any]:
        _, group = self._find_group(key, name)
        pending = sorted(group.pending.items())
        if not rest:
            owners: dict[bytes, int] = {}
            for _, entry in pending:
                owners[entry.consumer] = owners.get(entry.consumer, 0) + 1
            bounds = [_format_id(pending[0][0]), _format_id(pending[-1][0])] if pending else [None, None]
            return [len(pending), *bounds, [[who, b"%d" % n] for who, n in sorted(owners.items())] or None]
        low, high = _parse_bound(rest[0], False), _parse_bound(rest[1], True)
        now = self._now_ms()
        rows = [
            [_format_id(id), entry.consumer, now - entry.delivered_ms, entry.count]
            for id, entry in pending
            if _within(id, low, high) and (len(rest) < 4 or entry.consumer == rest[3])
        ]
        return rows[: int(rest[2])]

    def _xinfo_consumers(self, key: bytes, name: bytes) -> list[Any]:
        _, group = self._find_group(key, name)
        now = self._now_ms()
        held = [entry.consumer for entry in group.pending.values()]
        return [
            [
                b"name",
                who,
                b"pending",
                held.count(who),
                b"idle",
                now - seen,
                b"inactive",
                now - active if active >= 0 else -1,
            ]
            for who, (seen, active) in sorted(group.consumers.items())
        ]
