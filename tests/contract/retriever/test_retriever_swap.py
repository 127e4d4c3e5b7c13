"""An index is replaced under load; if the new one cannot be loaded, the old one keeps serving."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import pytest

from forage_common.settings import RetrievalMode, RetrieverSettings
from forage_retriever.index.cache import build_cached

CLIENTS = 4


@dataclass(frozen=True)
class Service:
    process: subprocess.Popen[str]
    http: str
    link: Path

    def move_link(self, folder: Path) -> None:
        """Move the link that the settings name, in one step."""
        new_link = self.link.with_suffix(".new")
        new_link.symlink_to(folder)
        new_link.replace(self.link)

    def reload(self) -> httpx.Response:
        return httpx.post(f"{self.http}/reload", timeout=60)

    def read_acts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.link.parent / "audit.jsonl").read_text().splitlines()]

    def read_metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.http}/metrics", timeout=20) as page:
            lines = page.read().decode().splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith(f"{name} ")))


def write_corpus(file: Path, word: str, passages: int = 20) -> None:
    rows = [{"id": f"{word}{n}", "contents": f'"{word} {n}"\nplace {n} of {word}'} for n in range(passages)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def built(tmp_path: Path) -> Callable[[str], Path]:
    """Builds an index over passages about one word; returns its folder."""

    def build(word: str) -> Path:
        corpus, cache = tmp_path / f"{word}.jsonl", tmp_path / f"cache-{word}"
        write_corpus(corpus, word)
        return build_cached(corpus, RetrieverSettings(mode=RetrievalMode.BM25, cache_dir=cache), None, lambda *_: None)

    return build


@pytest.fixture
def service(
    start_service: Callable[..., Any],
    wait_until_ready: Callable[..., None],
    built: Callable[[str], Path],
    tmp_path: Path,
    free_address: Callable[[], str],
) -> Service:
    link, http = tmp_path / "current", free_address()
    link.symlink_to(built("old"))
    chosen = [f"retriever.index={link}", "retriever.mode=bm25", f"retriever.http_address={http}"]
    audit = f"security.audit_file={tmp_path / 'audit.jsonl'}"
    process = start_service("retriever", *chosen, f"retriever.grpc_address={free_address()}", audit)
    wait_until_ready(process, http)
    return Service(process, f"http://{http}", link)


def search(client: httpx.Client, number: int) -> tuple[int, str, str]:
    """Status, index digest and the document's word, of a search that is not in the cache."""
    reply = client.post("/retrieve", json={"queries": [f"place {number}"], "topk": 1})
    results = reply.json().get("result", [[{"contents": ""}]])
    return reply.status_code, reply.headers.get("X-Forage-Index-Digest", ""), results[0][0]["contents"].split()[-1]


class Load:
    """Clients that search without a pause until the block ends."""

    def __init__(self, service: Service) -> None:
        self.seen: list[list[tuple[int, str, str]]] = [[] for _ in range(CLIENTS)]
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(service.http, seen)) for seen in self.seen]

    def _run(self, base: str, seen: list[tuple[int, str, str]]) -> None:
        with httpx.Client(base_url=base, timeout=30) as client:
            while not self._stop.is_set():
                seen.append(search(client, len(seen)))

    def wait_for_word(self, word: str) -> None:
        """Wait until the last document of every client is about this word."""
        deadline = time.monotonic() + 60
        while not all(seen and seen[-1][2] == word for seen in self.seen):
            assert time.monotonic() < deadline, f"no {word} but {[seen[-1:] for seen in self.seen]}"
            time.sleep(0.01)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


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


def test_large_requests_and_a_full_queue_survive_a_swap_whole(service: Service, built: Callable[[str], Path]) -> None:
    """Each is of one index, and those that wait in the queue of the old one are answered by it."""
    old, new = service.link.resolve(), built("new")
    seen: list[set[str]] = []

    def ask(base: str, number: int) -> None:
        queries = [f"place {number} {query}" for query in range(500)]
        reply = httpx.post(f"{base}/retrieve", json={"queries": queries, "topk": 1}, timeout=120)
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


def test_the_old_index_is_served_when_the_build_of_a_new_one_is_killed(
    service: Service, start_service: Callable[..., Any], tmp_path: Path
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
