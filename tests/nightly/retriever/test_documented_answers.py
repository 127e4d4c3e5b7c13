"""A running service answers requests, valid and invalid ones, as its own OpenAPI page says.

What hostile requests do to it is the subject of `make fuzz`.
"""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
import requests
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from waiting import WAIT_S, wait_until

PAGE_EXAMPLES = 600
HURRIED_S = 60.0


def fails_only_for_lack_of_time(context: Any, response: Any, case: Any) -> bool | None:
    """No 5xx, but 503 where the caller said that it waits for a moment only."""
    limit = case.body.get("timeout_s") if isinstance(case.body, dict) else None
    if response.status_code == 503 and isinstance(limit, int | float) and limit < HURRIED_S:
        return None
    return not_a_server_error(context, response, case)


CHECKS = [fails_only_for_lack_of_time, content_type_conformance, response_schema_conformance, status_code_conformance]


@dataclass(frozen=True)
class Service:
    process: subprocess.Popen[str]
    http: str

    def check(self) -> None:
        """Check that it still answers and has counted no internal error."""
        assert self.process.poll() is None
        reply = httpx.post(f"http://{self.http}/retrieve", json={"queries": ["Oslo"], "topk": 1}, timeout=WAIT_S)
        assert [row["id"] for row in reply.raise_for_status().json()["result"][0]] == ["p1"]
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=WAIT_S) as page:
            lines = page.read().decode().splitlines()
        counted = [line for line in lines if line.startswith("forage_retriever_requests_total{")]
        assert not [line for line in counted if 'code="5' in line and 'code="503"' not in line]
        assert not [line for line in counted if 'code="INTERNAL"' in line]
        assert not [
            line for line in lines if line.startswith("forage_retriever_search_failures_total ") and line[-3:] != "0.0"
        ]


def is_ready(http: str) -> bool:
    try:
        return httpx.get(f"http://{http}/readyz", timeout=WAIT_S).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def service(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, free_address: Callable[[], str]
) -> Iterator[Service]:
    """A service over a small corpus."""
    folder = tmp_path_factory.mktemp("documented")
    titles = ["Norway", "Oslo", "Kandy", "São Paulo"]
    rows = [
        {"id": f"p{n}", "contents": f'"{title}"\n{title} is a place.', "lang": "nb"} for n, title in enumerate(titles)
    ]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    http, grpc_ = free_address(), free_address()
    log = (folder / "log").open("w+")
    process = subprocess.Popen(
        [
            str(repository / ".venvs/retriever/bin/python"),
            *("-m", "forage_retriever", f"data.corpus={folder / 'corpus.jsonl'}", "retriever.mode=bm25"),
            *(f"retriever.cache_dir={folder / 'cache'}", "retriever.filter_fields=[lang, url]"),
            *(f"retriever.http_address={http}", f"retriever.grpc_address={grpc_}"),
        ],
        stderr=log,
        text=True,
    )
    try:
        wait_until(lambda: is_ready(http))
        yield Service(process, http)
        log.seek(0)
        assert "_failed" not in log.read()  # the ending of unexpected events
    finally:
        process.kill()
        process.wait()
        log.close()


def test_requests_generated_from_the_openapi_page_are_answered_as_documented(service: Service) -> None:
    schema = schemathesis.openapi.from_url(f"http://{service.http}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    searches = [operation for operation in operations if operation.method.upper() == "POST" and operation.body]
    assert {operation.path for operation in searches} == {"/retrieve", "/queries", "/access"}
    session = requests.Session()

    def ask(operation: Any, mode: schemathesis.GenerationMode, examples: int) -> None:
        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate],
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def send_one(case: Any) -> None:
            case.call_and_validate(base_url=f"http://{service.http}", session=session, checks=CHECKS, timeout=WAIT_S)

        send_one()

    for operation in operations:
        if operation in searches:
            for mode in schemathesis.GenerationMode:
                ask(operation, mode, PAGE_EXAMPLES // (len(searches) * len(list(schemathesis.GenerationMode))))
        else:
            ask(operation, schemathesis.GenerationMode.POSITIVE, 5)
    session.close()
    service.check()
