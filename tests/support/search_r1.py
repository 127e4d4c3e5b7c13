"""A search as Search-R1's training loop sends it."""

from __future__ import annotations

from collections.abc import Sequence

import requests
from waiting import WAIT_S


def search(url: str, queries: Sequence[str], topk: object = 3, return_scores: object = True) -> list[list[str]]:
    """The titles of the passages, read as that loop reads them: any other reply is an exception that ends it."""
    payload = {"queries": queries, "topk": topk, "return_scores": return_scores}
    results = requests.post(url, json=payload, timeout=WAIT_S).json()["result"]
    return [[item["document"]["contents"].split("\n")[0].strip('"') for item in result] for result in results]
