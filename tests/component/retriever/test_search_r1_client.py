"""What Search-R1's training loop asks of its retriever: `requests.post(url, json=…).json()["result"]`, no retries."""

from __future__ import annotations

import pytest
import requests
from retriever_service import TITLES, Service
from search_r1 import search
from waiting import WAIT_S


@pytest.fixture
def url(shared_service: Service) -> str:
    return f"{shared_service.http}/retrieve"


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
    bare = requests.post(url, json={"queries": ["Oslo"], "topk": 1}, timeout=WAIT_S).json()["result"]
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
        reply = requests.post(url, json=payload, timeout=WAIT_S)
        assert (reply.status_code, sentence in reply.json()["detail"]) == (code, True)
