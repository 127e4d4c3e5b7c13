"""A small Redis in memory: the commands that Forage uses, and Lua scripts, which run as they are in a real Lua 5.1.

`execute` takes and returns what the wire carries: bytes, whole numbers, lists, None. `test_simulated_redis.py` compares
it with a real server.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from lupa.lua51 import LuaRuntime, lua_type
from redis.exceptions import ResponseError

from simulation.redis_streams import OK, Stream, StreamCommands

_LUA = LuaRuntime(encoding=None, unpack_returned_tuples=False)


class SortedSet(dict[bytes, float]):
    """Member → score."""


def _encode(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, float):
        return b"%d" % value if value.is_integer() else repr(value).encode()
    return str(value).encode()


@cache
def _compile(library: bytes) -> Any:
    first, _, body = library.partition(b"\n")
    assert first.startswith(b"#!lua name=")
    return _LUA.execute(b"return function(redis) " + body + b"\nend")


def _to_lua(value: Any) -> Any:
    if value is None:
        return False
    if value is OK:
        return _LUA.table_from({b"ok": OK})
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


class Store(StreamCommands):
    """The data of a server, and its commands."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self.data: dict[bytes, Any] = {}
        self.changes = 0
        """Grows with every change of the data."""
        self._now_ms = now_ms
        self.functions: dict[bytes, Any] = {}
        """Name → function in Lua, of all libraries."""
        call = _LUA.eval(
            b"function(call, pcall, register) return { register_function = register,"
            b" call = function(...) return call({...}, select('#', ...)) end,"
            b" pcall = function(...) return pcall({...}, select('#', ...)) end,"
            b" error_reply = function(text) return {err = text} end,"
            b" status_reply = function(text) return {ok = text} end } end"
        )
        self._redis = call(self._call_from_lua, self._try_from_lua, self._register)

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

    # Functions

    def _register(self, table: Any) -> None:
        self.functions[table[b"function_name"]] = table[b"callback"]

    def _function_load(self, code: bytes) -> bytes:
        _compile(code)(self._redis)
        return code.partition(b"\n")[0].partition(b"=")[2]

    def _fcall(self, name: bytes, count: bytes, *rest: bytes) -> Any:
        if name not in self.functions:
            raise ResponseError("Function not found")
        keys = _LUA.table_from(list(rest[: int(count)]))
        arguments = _LUA.table_from(list(rest[int(count) :]))
        return _from_lua(self.functions[name](keys, arguments))

    _fcall_ro = _fcall

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
        return OK

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

    def _hvals(self, key: bytes) -> list[bytes]:
        return list(self._get_typed(key, dict).values())

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
