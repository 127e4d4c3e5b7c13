"""The server of a simulated run, and the client that a process has of it: redis-py, without a network."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import redis

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_queue.streams.connection import notice_lost_reply
from forage_queue.streams.functions import build_library
from simulation.redis_store import Store
from simulation.redis_streams import Stream
from simulation.world import Process, Signal, World

_LATENCY_S = 0.002
_COPIES = 40
_NO_GROUPS = (b"rejected", b"announced", b"served", b"finished")
_GARBLED = b"\xff\xff\xff"
Hook = Callable[[str, Callable[[], Any]], Any]
"""Called around every command that may change something: (what it is, the command)."""


class Server:
    """One server; `down_until` says until when it refuses connections."""

    def __init__(self, world: World) -> None:
        self.store = Store(lambda: int((world.wall_offset + world.now) * 1000))
        self.down_until = 0.0
        self.unreachable_until: dict[Process, float] = {}
        self.changed = Signal()
        self.keeps_copies = False
        """Whether `forget_tail` may be called."""
        self._copies: list[tuple[float, dict[bytes, Any]]] = []
        self._world = world

    def execute(self, command: tuple[Any, ...]) -> Any:
        before = self.store.changes
        try:
            return self.store.execute(*command)
        finally:
            if self.store.changes != before:
                self._world.set(self.changed)
                if self.keeps_copies:
                    self._copies.append((self._world.now, copy.deepcopy(self.store.data)))
                    del self._copies[:-_COPIES]

    def forget_tail(self, seconds: float) -> None:
        """Lose the last changes, as where the append-only file is not flushed at every write."""
        old = [data for when, data in self._copies if when <= self._world.now - seconds]
        kept = old[-1:] or [data for _, data in self._copies[:1]]
        if kept:
            self.store.data = kept[0]
        self._copies.clear()
        self._world.set(self.changed)

    def forget_all(self) -> None:
        """Lose all data, as with a lost volume."""
        self.store.data.clear()
        self.store.functions.clear()
        self._world.set(self.changed)

    def delete_entry(self, is_prompt: bool) -> None:
        """Delete an entry of a stream, as a careless operator may."""
        if found := self._pick(is_prompt):
            key, id, _ = found
            del self.store.data[key].entries[id]

    def garble_group(self) -> None:
        """Replace the content of a group by what is no message."""
        if found := self._pick(is_prompt=False):
            found[2][:] = [b"p", _GARBLED]

    def forge_group(self) -> None:
        """Add a copy of a group under the name of one that was never issued."""
        if (found := self._pick(is_prompt=False)) and found[2][1] != _GARBLED:
            key, _, fields = found
            group = PackedGroup.FromString(fields[1])
            group.head.group_uid += "0"
            self.store.execute("XADD", key, "*", "p", group.SerializeToString())
            self._world.set(self.changed)

    def _pick(self, is_prompt: bool) -> tuple[bytes, tuple[int, int], list[bytes]] | None:
        """Some entry of a stream, if there is one: (key, id, fields)."""
        streams = {
            key: value
            for key, value in self.store.data.items()
            if isinstance(value, Stream) and not key.endswith(_NO_GROUPS) and key.endswith(b"prompts") == is_prompt
        }
        entries = [(key, id, fields) for key, stream in streams.items() for id, fields in stream.entries.items()]
        return self._world.random.choice(entries) if entries else None

    def refuses(self, process: Process | None) -> bool:
        """Whether a process gets no connection now."""
        now = self._world.now
        return self.down_until > now or (process is not None and self.unreachable_until.get(process, 0.0) > now)


class Client(redis.Redis):
    """redis-py's client with its retries, over a simulated connection."""

    def connect(self, world: World, server: Server, on_command: Hook) -> None:
        self._world, self._server, self._on_command = world, server, on_command
        self._again = self.connection_pool.connection_kwargs["retry"]
        self._again.update_supported_errors(self.connection_pool.connection_kwargs.get("retry_on_error") or [])

    def execute_command(self, *args: Any, **options: Any) -> Any:
        name = args[0]
        response = self._again.call_with_retry(lambda: self._try(name, args), lambda _: None)
        options.pop("keys", None)  # for a cache that is not used
        callback = self.response_callbacks.get(name)
        return callback(response, **options) if callback is not None else response

    def _try(self, name: str, args: tuple[Any, ...]) -> Any:
        with notice_lost_reply():
            return self._send(name, args)

    def _send(self, name: str, args: tuple[Any, ...]) -> Any:
        world, server = self._world, self._server
        world.sleep(world.random.random() * _LATENCY_S)
        if server.refuses(world.process):
            raise redis.ConnectionError("connection refused")
        response = self._on_command(self._describe(name, args), lambda: self._execute(args))
        if "XREAD" in name and response is None:
            response = self._block(args, "xread" if name == "XREAD" else "claim")
        world.sleep(world.random.random() * _LATENCY_S)
        return response

    def _execute(self, args: tuple[Any, ...]) -> Any:
        if self._server.refuses(self._world.process):
            raise redis.ConnectionError("connection closed by server")
        return self._server.execute(args)

    def _block(self, args: tuple[Any, ...], what: str) -> Any:
        world = self._world
        words = [part.upper() if isinstance(part, str) else part for part in args]
        if "BLOCK" not in words and b"BLOCK" not in words:
            return None
        block = args[(words.index("BLOCK") if "BLOCK" in words else words.index(b"BLOCK")) + 1]
        end = world.now + int(block) / 1000
        while world.now < end and world.wait(self._server.changed, end - world.now):
            response = self._on_command(what, lambda: self._execute(args))
            if response is not None:
                return response
        return None

    def _describe(self, name: str, args: tuple[Any, ...]) -> str:
        if name in ("FCALL", "FCALL_RO"):
            known = args[1].encode() in self._server.store.functions
            return args[1].removeprefix(f"{build_library().name}_") if known else "unknown function"
        return name.lower()


def patch_connections(world: World, server: Server, on_command: Hook) -> Any:
    """Let `redis.Redis.from_url` connect to the simulated server."""
    real = redis.Redis.from_url.__func__  # type: ignore[attr-defined]

    def from_url(url: str, **options: Any) -> Client:
        client: Client = real(Client, url, protocol=2, **options)
        client.connect(world, server, on_command)
        return client

    return mock.patch.object(redis.Redis, "from_url", from_url)
