"""Callers that send their request byte by byte, or none at all, keep nobody else from the service and are let go."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import WAIT_S

CONNECTIONS = 600
DRIP_S = 0.5


@pytest.fixture
def address(
    start_service: Callable[..., Any],
    wait_until_ready: Callable[..., None],
    tmp_path: Path,
    free_address: Callable[[], str],
) -> str:
    corpus, http = tmp_path / "corpus.jsonl", free_address()
    corpus.write_text(json.dumps({"id": "o", "contents": '"Oslo"\nOslo is a place.'}) + "\n")
    own = [f"data.corpus={corpus}", "retriever.mode=bm25", f"retriever.cache_dir={tmp_path / 'cache'}"]
    process = start_service(
        "retriever", *own, f"retriever.http_address={http}", f"retriever.grpc_address={free_address()}"
    )
    wait_until_ready(process, http)
    return http


class Drippers:
    """Connections that add a byte to their request twice a second; a third of them sends nothing."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.open = [socket.create_connection((host, int(port)), timeout=WAIT_S) for _ in range(CONNECTIONS)]
        for number, one in enumerate(self.open):
            if number % 3:
                one.sendall(b"POST /retrieve HTTP/1.1\r\nX-Slow: ")
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._drip)
        self._thread.start()

    def _drip(self) -> None:
        while self.open and not self._end.wait(DRIP_S):  # lint: short because it is the pause between two bytes
            gone, _, _ = select.select(self.open, [], [], 0)  # the service never answers half a head: it is their end
            for one in gone:
                one.close()
            self.open = [one for one in self.open if one not in gone]
            for number, one in enumerate(self.open):
                if number % 3:
                    with contextlib.suppress(OSError):
                        one.send(b"a")

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        for one in self.open:
            one.close()


@contextmanager
def drip(address: str) -> Iterator[Drippers]:
    drippers = Drippers(address)
    try:
        yield drippers
    finally:
        drippers.close()


def test_callers_are_served_while_hundreds_drip_and_those_are_let_go(address: str) -> None:
    with drip(address) as drippers, httpx.Client(base_url=f"http://{address}", timeout=WAIT_S) as kept:
        assert len(drippers.open) > CONNECTIONS / 2
        searches = 0
        while drippers.open:
            for post in (kept.post, lambda path, **body: httpx.post(f"http://{address}{path}", timeout=WAIT_S, **body)):
                reply = post("/retrieve", json={"queries": [f"Oslo {searches}"], "topk": 1})
                assert [document["id"] for document in reply.raise_for_status().json()["result"][0]] == ["o"]
                searches += 1
            time.sleep(0.1)
    assert searches, "they were let go before anybody was served"
