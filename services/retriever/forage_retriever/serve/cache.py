"""The cache of recent results: policies repeat queries often."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from prometheus_client import Gauge

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
ENTRIES = Gauge("forage_retriever_cache_entries", "Results in the cache")


class LruCache(Generic[K, V]):
    """At most `capacity` values by key; the least recently used one is evicted. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._capacity:
            self._values.popitem(last=False)
        ENTRIES.set(len(self._values))

    def clear(self) -> None:
        self._values.clear()
        ENTRIES.set(0)

    def __len__(self) -> int:
        return len(self._values)
