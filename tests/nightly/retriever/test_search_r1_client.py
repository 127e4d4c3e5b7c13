"""Search-R1's training loop before its retriever has an index: its requests wait, for it does not try again."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
from retriever_service import TITLES, make_settings
from search_r1 import search
from service_process import StartService
from waiting import WAIT_S, wait_until


def test_a_search_before_the_index_is_loaded_waits_for_it(
    start_service: StartService, tmp_path: Path, free_address: Callable[[], str]
) -> None:
    settings = make_settings(tmp_path, free_address)
    rows = ({"id": n, "contents": f'"T{n}"\n{"word " * 20}{n}'} for n in range(15_000))
    with (tmp_path / "corpus.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    start_service("retriever", *(f"{key}={value}" for key, value in settings.items()))
    base = f"http://{settings['retriever.http_address']}"

    def ask() -> int:
        try:
            return requests.get(f"{base}/readyz", timeout=WAIT_S).status_code
        except requests.ConnectionError:  # it does not listen yet
            return 0

    assert wait_until(ask) == 503
    with ThreadPoolExecutor(8) as callers:
        found = list(callers.map(lambda title: search(f"{base}/retrieve", [title], 1), TITLES))
    assert found == [[[title]] for title in TITLES]
