"""The cache of recent results: policies repeat queries often. Its bound is memory: callers choose how large one is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from prometheus_client import Counter, Gauge

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
ENTRIES = Gauge("forage_retriever_cache_entries", "Results in the cache")
BYTES = Gauge("forage_retriever_cache_bytes", "Memory of the results in the cache, at most retriever.cache_bytes")
EVICTIONS = Counter("forage_retriever_cache_evictions_total", "Results that left the cache for newer ones")

LARGEST_SHARE = 100
"""An entry of more than this part of the capacity is not kept: a few of them would evict all that is repeated."""


class LruCache(Generic[K, V]):
    """Values by key within `capacity` bytes; the least recently used ones are evicted. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: K) -> V | None:
        entry = self._values.get(key)
        if entry is None:
            return None
        self._values.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, size: int) -> None:
        """Keep a value.

        Args:
            size: bytes of key and value.
        """
        if size * LARGEST_SHARE > self._capacity:
            return
        _, replaced = self._values.pop(key, (None, 0))
        self._values[key] = value, size
        self._bytes += size - replaced
        while self._bytes > self._capacity:
            _, (_, evicted) = self._values.popitem(last=False)
            self._bytes -= evicted
            EVICTIONS.inc()
        self._publish()

    def clear(self) -> None:
        self._values.clear()
        self._bytes = 0
        self._publish()

    def _publish(self) -> None:
        ENTRIES.set(len(self._values))
        BYTES.set(self._bytes)

    @property
    def bytes(self) -> int:
        """Bytes of all entries."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._values)
