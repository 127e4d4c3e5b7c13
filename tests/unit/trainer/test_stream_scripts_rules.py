"""Which consumers the streams' script `prune` forgets: those that are silent and hold no entry."""

from __future__ import annotations

from typing import Any

from simulation.redis_store import Store

from forage_queue.streams.functions import build_library, name_function

SILENCE_MS = 3_600_000


def test_a_consumer_is_forgotten_once_it_is_silent_unless_it_holds_an_entry() -> None:
    now = [10**9]
    store = Store(lambda: now[0])
    store.execute("FUNCTION", "LOAD", build_library().code)
    store.execute("XGROUP", "CREATE", "prompts", "forage", "0", "MKSTREAM")

    def claim(consumer: str) -> None:
        store.execute("XADD", "prompts", "*", "m", consumer)
        ((_, ((id_, _),)),) = store.execute(
            "XREADGROUP", "GROUP", "forage", consumer, "COUNT", 1, "STREAMS", "prompts", ">"
        )
        if consumer != "holds":
            store.execute("XACK", "prompts", "forage", id_)

    def list_consumers() -> set[Any]:
        rows = store.execute("XINFO", "CONSUMERS", "prompts", "forage")
        return {dict(zip(row[::2], row[1::2], strict=True))[b"name"] for row in rows}

    def prune() -> set[Any]:
        keys = ["epoch", "replicas", "alive", "prompts"]
        store.execute("FCALL", name_function("prune"), len(keys), *keys, 1, "forage", 60, SILENCE_MS)
        return list_consumers()

    claim("gone")
    claim("holds")
    now[0] += SILENCE_MS
    claim("busy")
    assert prune() == {b"gone", b"holds", b"busy"}
    now[0] += 1000
    assert prune() == {b"holds", b"busy"}
