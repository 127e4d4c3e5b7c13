"""An index is replaced under large requests; damaged and half-built ones are refused, and the old one keeps serving."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from retriever_swap import Load, Service, built, service, write_corpus
from service_process import StartService
from waiting import WAIT_S

__all__ = ["built", "service"]


def test_large_requests_and_a_full_queue_survive_a_swap_whole(service: Service, built: Callable[[str], Path]) -> None:
    """Each is of one index, and those that wait in the queue of the old one are answered by it."""
    old, new = service.link.resolve(), built("new")
    seen: list[set[str]] = []

    def ask(base: str, number: int) -> None:
        queries = [f"place {number} {query}" for query in range(500)]
        reply = httpx.post(f"{base}/retrieve", json={"queries": queries, "topk": 1}, timeout=WAIT_S)
        results = reply.raise_for_status().json()["result"]
        assert len(results) == len(queries)
        seen.append({documents[0]["contents"].split()[-1] for documents in results})

    with Load(service) as load, ThreadPoolExecutor(6) as callers:
        load.wait_for_word("old")
        asked = [callers.submit(ask, service.http, number) for number in range(12)]
        for folder in (new, old, new):
            service.move_link(folder)
            assert service.reload().json()["swapped"] is True
        for one in asked:
            one.result()
        load.wait_for_word("new")
    assert {len(words) for words in seen} == {1}
    assert {status for each in load.seen for status, _, _ in each} == {200}


@pytest.mark.parametrize("opening", ["[", '{"manifest":'])
def test_a_manifest_nested_thousands_deep_is_409(
    service: Service, built: Callable[[str], Path], tmp_path: Path, opening: str
) -> None:
    nested = tmp_path / "nested"
    shutil.copytree(built("nested"), nested)
    (nested / "manifest.json").write_text(opening * 200_000)
    service.move_link(nested)
    reply = service.reload()
    assert reply.status_code == 409
    assert "manifest.json is damaged" in reply.json()["detail"]


def test_the_old_index_is_served_when_the_build_of_a_new_one_is_killed(
    service: Service, start_service: StartService, tmp_path: Path
) -> None:
    corpus, cache = tmp_path / "large.jsonl", tmp_path / "cache-large"
    write_corpus(corpus, "large", 200_000)
    settings = [f"data.corpus={corpus}", "retriever.mode=bm25", f"retriever.cache_dir={cache}"]
    writer = start_service("retriever.prepare", *settings)
    with Load(service) as load:
        while not (files := [file for file in cache.rglob("*") if file.is_file() and file.stat().st_size]):
            assert writer.poll() is None, writer.communicate()[1]
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        assert not list(cache.glob("bm25-*"))
        service.move_link(next(folder for folder in cache.iterdir() if folder in files[0].parents))
        reply = service.reload()
        load.wait_for_word("old")
    assert reply.status_code == 409
    assert str(cache) in reply.json()["detail"]
    assert {(status, word) for seen in load.seen for status, _, word in seen} == {(200, "old")}
