"""Entries of a run's streams: claimed, taken over, and removed where nobody could ever use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from forage_queue.streams.history import recorded
from forage_queue.streams.run_keys import GROUP, RunKeys

_FIELD = b"m"
RECLAIM_SCAN = 64
_REJECTED_KEPT, _REJECTED_BYTES = 1000, 16_384
T = TypeVar("T")
M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Entry(Generic[T]):
    """What was claimed from a stream and is not yet acknowledged."""

    id: bytes
    message: T


class EntryStreams(RunKeys):
    """The streams of one run, whatever is on them."""

    @recorded
    def reject(self, stream: str, id: bytes, content: bytes) -> None:
        """Remove an entry that nobody can use; its beginning is kept for diagnosis.

        Raises:
            FencedError: this is a trainer, and a later one has taken over.
        """
        keys = [stream, self.key("rejected"), self._stored_table(stream)]
        names = self._run_unless_replaced("reject", keys, GROUP, id, content[:_REJECTED_BYTES], _REJECTED_KEPT)
        self._delete_payloads(stream, names)

    def _stored_table(self, stream: str) -> str:
        """The hash of the files that entries of a stream refer to: entry id → name."""
        return self.key(f"stored:{self._shorten(stream)}")

    def _delete_payloads(self, stream: str, names: Sequence[bytes], is_closed: bool = False) -> None:
        """Delete the files of entries that have left a stream, and its folder where the stream has ended."""

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
