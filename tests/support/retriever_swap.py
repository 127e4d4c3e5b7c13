"""A retriever as a process whose index is replaced, and clients that search meanwhile."""

from __future__ import annotations

import json
import subprocess
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import WAIT_S, wait_until

from forage_retriever.index.cache import build_cached
from forage_runtime.settings import RetrievalMode, RetrieverSettings

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
        return httpx.post(f"{self.http}/reload", timeout=WAIT_S)

    def read_acts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.link.parent / "audit.jsonl").read_text().splitlines()]

    def read_metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.http}/metrics", timeout=WAIT_S) as page:
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
        with httpx.Client(base_url=base, timeout=WAIT_S) as client:
            while not self._stop.is_set():
                seen.append(search(client, len(seen)))

    def wait_for_word(self, word: str) -> None:
        """Wait until the last document of every client is about this word."""
        wait_until(
            lambda: all(seen and seen[-1][2] == word for seen in self.seen),
            lambda: f"no {word} but {[seen[-1:] for seen in self.seen]}",
        )

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
