"""What Search-R1's training loop asks of its retriever: `requests.post(url, json=…).json()["result"]`, no retries."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

TITLES = ["Norway", "Oslo", "Kandy", "Kandi", "São Paulo"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    rows = [{"id": f"p{n}", "contents": f'"{title}"\n{title} is a place.'} for n, title in enumerate(TITLES)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def settings(corpus: Path, free_address: Callable[[], str]) -> dict[str, str]:
    return {
        "data.corpus": str(corpus),
        "retriever.mode": "bm25",
        "retriever.cache_dir": str(corpus.parent / "cache"),
        "retriever.http_address": free_address(),
        "retriever.grpc_address": free_address(),
    }


@pytest.fixture
def url(start_service: Callable[..., Any], wait_until_ready: Callable[..., None], settings: dict[str, str]) -> str:
    process = start_service("retriever", *(f"{key}={value}" for key, value in settings.items()))
    wait_until_ready(process, settings["retriever.http_address"])
    return f"http://{settings['retriever.http_address']}/retrieve"


def search(url: str, queries: Sequence[str], topk: object = 3, return_scores: object = True) -> list[list[str]]:
    """The titles of the passages, read as that loop reads them: any other reply is an exception that ends it."""
    payload = {"queries": queries, "topk": topk, "return_scores": return_scores}
    results = requests.post(url, json=payload, timeout=120).json()["result"]
    return [[item["document"]["contents"].split("\n")[0].strip('"') for item in result] for result in results]


def test_numbers_and_truths_may_be_written_otherwise(url: str) -> None:
    for topk in (2, "2", 2.0):
        for return_scores in (True, 1, "true"):
            assert search(url, ["Oslo Norway place", "Paulo"], topk, return_scores) == [
                ["Norway", "Oslo"],
                ["São Paulo"],
            ]


def test_requests_that_its_server_answers_are_answered(url: str) -> None:
    assert search(f"{url}/", ["Oslo"], 1) == [["Oslo"]]
    assert search(url, ["Oslo", "", " "], 1) == [["Oslo"], [], []]  # BM25 upstream too finds nothing without a word
    assert len(search(url, ["place"], 1000)[0]) == len(TITLES)
    bare = requests.post(url, json={"queries": ["Oslo"], "topk": 1}, timeout=60).json()["result"]
    assert bare == [[{"id": "p1", "contents": '"Oslo"\nOslo is a place.'}]]


def test_a_batch_of_ten_thousand_is_answered_whole(url: str) -> None:
    queries = [f"{TITLES[number % 2]} {number}" for number in range(10_000)]
    assert search(url, queries, 1) == [[TITLES[number % 2]] for number in range(10_000)]


def test_what_nothing_sensible_can_be_done_with_is_said(url: str) -> None:
    for payload, code, sentence in (
        ({"queries": ["x"] * 70_000}, 422, "70000 queries are more than 65536 in one request: split it"),
        ({"queries": ["x"], "topk": "three"}, 422, "topk: "),
        ({"queries": ["x" * 17 * 2**20]}, 413, "send fewer queries at a time"),
    ):
        reply = requests.post(url, json=payload, timeout=60)
        assert (reply.status_code, sentence in reply.json()["detail"]) == (code, True)


def test_a_search_before_the_index_is_loaded_waits_for_it(
    start_service: Callable[..., Any], settings: dict[str, str], corpus: Path
) -> None:
    rows = ({"id": n, "contents": f'"T{n}"\n{"word " * 20}{n}'} for n in range(15_000))
    with corpus.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    start_service("retriever", *(f"{key}={value}" for key, value in settings.items()))
    base = f"http://{settings['retriever.http_address']}"
    deadline = time.monotonic() + 60
    while True:
        try:
            ready = requests.get(f"{base}/readyz", timeout=60)
            break
        except requests.ConnectionError:  # it does not listen yet
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert ready.status_code == 503
    with ThreadPoolExecutor(8) as callers:
        found = list(callers.map(lambda title: search(f"{base}/retrieve", [title], 1), TITLES))
    assert found == [[[title]] for title in TITLES]
