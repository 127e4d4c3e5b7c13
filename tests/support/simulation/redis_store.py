"""A small Redis in memory: the commands that Forage uses, and Lua scripts, which run as they are in a real Lua 5.1.

`execute` takes and returns what the wire carries: bytes, whole numbers, lists, None. `test_simulated_redis.py` compares
it with a real server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from lupa.lua51 import LuaRuntime, lua_type
from redis.exceptions import NoScriptError, ResponseError

Id = tuple[int, int]
_LUA = LuaRuntime(encoding=None, unpack_returned_tuples=False)
_OK = b"OK"


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


class SortedSet(dict[bytes, float]):
    """Member → score."""


def _encode(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, float):
        return b"%d" % value if value.is_integer() else repr(value).encode()
    return str(value).encode()


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


@cache
def _compile(script: bytes) -> Any:
    body = b"\n".join(line for line in script.split(b"\n") if not line.startswith(b"#!"))
    return _LUA.execute(b"return function(KEYS, ARGV, redis) " + body + b"\nend")


def _to_lua(value: Any) -> Any:
    if value is None:
        return False
    if value is _OK:
        return _LUA.table_from({b"ok": _OK})
    if isinstance(value, list):
        return _LUA.table_from([_to_lua(item) for item in value])
    return value


def _from_lua(value: Any) -> Any:
    if value is None or value is False:
        return None
    if value is True:
        return 1
    if isinstance(value, float):
        return int(value)
    if lua_type(value) != b"table" and lua_type(value) != "table":
        return value
    if (error := value[b"err"]) is not None:
        raise ResponseError(error.decode())
    if (status := value[b"ok"]) is not None:
        return status
    items = []
    while (item := value[len(items) + 1]) is not None:
        items.append(_from_lua(item))
    return items


class Store:
    """The data of a server, and its commands."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self.data: dict[bytes, Any] = {}
        self.changes = 0
        """Grows with every change of the data."""
        self._now_ms = now_ms
        self._scripts: dict[bytes, bytes] = {}
        call = _LUA.eval(
            b"function(call, pcall, failed) return {"
            b" call = function(...) return call({...}, select('#', ...)) end,"
            b" pcall = function(...) return pcall({...}, select('#', ...)) end,"
            b" error_reply = function(text) return {err = text} end,"
            b" status_reply = function(text) return {ok = text} end } end"
        )
        self._redis = call(self._call_from_lua, self._try_from_lua, None)

    def execute(self, *command: Any) -> Any:
        """Run a command.

        Raises:
            ResponseError: as the server words it.
        """
        name, *args = [_encode(part) for part in command]
        words = name.decode().upper().split()
        run = getattr(self, "_" + "_".join(words).lower(), None)
        if run is None and args:
            run = getattr(self, f"_{words[0]}_{args[0].decode()}".lower(), None)
            args = args[1:]
        if run is None:
            raise ResponseError(f"unknown command '{' '.join(words)}' (the simulated server has no such command)")
        return run(*args)

    def _call_from_lua(self, table: Any, count: float) -> Any:
        return _to_lua(self.execute(*[table[i] for i in range(1, int(count) + 1)]))

    def _try_from_lua(self, table: Any, count: float) -> Any:
        try:
            return self._call_from_lua(table, count)
        except ResponseError as error:
            return _LUA.table_from({b"err": str(error).encode()})

    # Scripts

    def knows(self, sha: bytes) -> bool:
        """Whether a script was loaded."""
        return sha in self._scripts

    def _script_load(self, text: bytes) -> bytes:
        sha = hashlib.sha1(text).hexdigest().encode()
        self._scripts[sha] = text
        return sha

    def _evalsha(self, sha: bytes, count: bytes, *rest: bytes) -> Any:
        if sha not in self._scripts:
            raise NoScriptError("No matching script. Please use EVAL.")
        keys = _LUA.table_from(list(rest[: int(count)]))
        arguments = _LUA.table_from(list(rest[int(count) :]))
        return _from_lua(_compile(self._scripts[sha])(keys, arguments, self._redis))

    # Keys, strings, hashes, sorted sets

    def _get_typed(self, key: bytes, kind: type, create: bool = False) -> Any:
        value = self.data.get(key)
        if value is None:
            value = kind()
            if create:
                self.data[key] = value
        elif type(value) is not kind:
            raise ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    def _drop_if_empty(self, key: bytes) -> None:
        if key in self.data and not self.data[key]:
            del self.data[key]

    def _ping(self) -> bytes:
        return b"PONG"

    def _info(self, section: bytes) -> bytes:
        return b"maxmemory:0\r\n"

    def _memory_usage(self, key: bytes, *options: bytes) -> int | None:
        """Roughly: the bytes of the fields."""
        value = self.data.get(key)
        if isinstance(value, Stream):
            return sum(len(part) for fields in value.entries.values() for part in fields)
        return None if value is None else len(value)

    def _time(self) -> list[bytes]:
        seconds, ms = divmod(self._now_ms(), 1000)
        return [b"%d" % seconds, b"%d" % (ms * 1000)]

    def _exists(self, *keys: bytes) -> int:
        return sum(key in self.data for key in keys)

    def _del(self, *keys: bytes) -> int:
        found = sum(self.data.pop(key, None) is not None for key in keys)
        self.changes += found
        return found

    def _get(self, key: bytes) -> bytes | None:
        return self._get_typed(key, bytes) if key in self.data else None

    def _set(self, key: bytes, value: bytes, *expiry: bytes) -> bytes:
        """The key does not expire: whoever sets an expiry repeats the same value while it lives."""
        self.changes += 1
        self.data[key] = value
        return _OK

    def _incrby(self, key: bytes, amount: bytes) -> int:
        value = int(self._get(key) or 0) + int(amount)
        self._set(key, b"%d" % value)
        return value

    def _hset(self, key: bytes, *pairs: bytes) -> int:
        self.changes += 1
        table = self._get_typed(key, dict, create=True)
        before = len(table)
        table.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(table) - before

    def _hsetnx(self, key: bytes, name: bytes, value: bytes) -> int:
        return 0 if name in self._get_typed(key, dict) else self._hset(key, name, value)

    def _hget(self, key: bytes, name: bytes) -> bytes | None:
        return self._get_typed(key, dict).get(name)

    def _hgetall(self, key: bytes) -> list[bytes]:
        return [part for pair in self._get_typed(key, dict).items() for part in pair]

    def _hexists(self, key: bytes, name: bytes) -> int:
        return int(name in self._get_typed(key, dict))

    def _hlen(self, key: bytes) -> int:
        return len(self._get_typed(key, dict))

    def _hkeys(self, key: bytes) -> list[bytes]:
        return list(self._get_typed(key, dict))

    def _hdel(self, key: bytes, *names: bytes) -> int:
        table = self._get_typed(key, dict)
        found = sum(table.pop(name, None) is not None for name in names)
        self.changes += found
        self._drop_if_empty(key)
        return found

    def _zadd(self, key: bytes, *pairs: bytes) -> int:
        self.changes += 1
        members = self._get_typed(key, SortedSet, create=True)
        before = len(members)
        members.update({member: float(score) for score, member in zip(pairs[::2], pairs[1::2], strict=True)})
        return len(members) - before

    def _zcard(self, key: bytes) -> int:
        return len(self._get_typed(key, SortedSet))

    def _zrem(self, key: bytes, *names: bytes) -> int:
        members = self._get_typed(key, SortedSet)
        found = sum(members.pop(name, None) is not None for name in names)
        self.changes += found
        self._drop_if_empty(key)
        return found

    def _zrangebyscore(self, key: bytes, low: bytes, high: bytes) -> list[bytes]:
        members: SortedSet = self._get_typed(key, SortedSet)
        least, most = float(low.removeprefix(b"(")), float(high.removeprefix(b"("))
        found = [
            (score, member)
            for member, score in members.items()
            if (score > least if low.startswith(b"(") else score >= least)
            and (score < most if high.startswith(b"(") else score <= most)
        ]
        return [member for _, member in sorted(found)]

    # Streams

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
        return _OK

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
            raise ResponseError("the simulated server reads new entries alone")
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
