"""An index is replaced under load; if the new one cannot be loaded, the old one keeps serving."""

from __future__ import annotations

import signal
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from retriever_swap import Load, Service, built, service

__all__ = ["built", "service"]


def test_a_reload_under_load_fails_no_request_and_is_atomic_per_client(
    service: Service, built: Callable[[str], Path]
) -> None:
    old, new = service.link.resolve(), built("new")
    with Load(service) as load:
        load.wait_for_word("old")
        service.move_link(new)
        reply = service.reload()
        load.wait_for_word("new")
        service.move_link(old)
        service.process.send_signal(signal.SIGHUP)
        load.wait_for_word("old")
    assert reply.json()["swapped"] is True
    digests = {seen[1] for seen in load.seen[0]}
    assert len(digests) == 2
    assert reply.json()["index"] in digests
    for seen in load.seen:
        assert {status for status, _, _ in seen} == {200}
        assert [key for key, _ in groupby(seen, key=lambda one: one[2])] == ["old", "new", "old"]
        assert len({(digest, word) for _, digest, word in seen}) == 2
    assert service.read_metric("forage_retriever_swaps_total") == 2
    again = service.reload()
    assert (again.status_code, again.json()["swapped"]) == (200, False)
    acts = [(act["act"], act["actor"], act["service"]) for act in service.read_acts()]
    asked = [("swap_index", "127.0.0.1"), ("swap_index", "SIGHUP"), ("reload_index", "127.0.0.1")]
    assert acts == [(*act, "retriever") for act in asked]
    assert {act[which] for act in service.read_acts() for which in ("index", "before")} == digests


def test_an_index_that_cannot_be_loaded_leaves_the_old_one_serving(
    service: Service, built: Callable[[str], Path], tmp_path: Path
) -> None:
    corrupt = built("corrupt")
    largest = max((file for file in corrupt.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    damaged = bytearray(largest.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    largest.chmod(0o644)
    largest.write_bytes(damaged)
    with Load(service) as load:
        load.wait_for_word("old")
        for folder, sentence in ((corrupt, largest.name), (tmp_path / "none", "none")):
            service.move_link(folder)
            reply = service.reload()
            assert reply.status_code == 409
            assert sentence in reply.json()["detail"]
        load.wait_for_word("old")
    assert {(status, word) for seen in load.seen for status, _, word in seen} == {(200, "old")}
    assert service.read_metric("forage_retriever_swap_failures_total") == 2
    assert service.read_metric("forage_retriever_swaps_total") == 0
    assert [(act["act"], act["actor"]) for act in service.read_acts()] == 2 * [("refuse_index", "127.0.0.1")]
    assert largest.name in service.read_acts()[0]["reason"]
