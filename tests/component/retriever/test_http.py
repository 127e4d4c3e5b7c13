"""The HTTP server over a real BM25 index: Search-R1's format, errors, probes and the OpenAPI page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from retriever_parts import DEFAULT_TOPK, LONG_S, open_retrieval, record_bm25
from retriever_servers import open_http_client, wait_until_queued

from forage_retriever.index.load import Index
from forage_retriever.serve import http_api, retrieval
from forage_retriever.serve.retrieval import Retrieval
from forage_runtime.telemetry.health import Health
from forage_runtime.telemetry.waits import waiting

CITIES = {"queries": ["city of Norway"]}


@pytest.fixture
async def client(loaded: Index) -> AsyncIterator[httpx.AsyncClient]:
    async with open_retrieval(loaded) as core, open_http_client(core) as client:
        yield client


@pytest.mark.parametrize(
    ("body", "lengths"),
    [
        ({"queries": ["Oslo Norway Kandy Kandi"]}, [DEFAULT_TOPK]),
        ({"queries": ["Oslo Norway Kandy Kandi"], "topk": 0}, [DEFAULT_TOPK]),
        ({"queries": ["Oslo Norway Kandy Kandi"], "topk": None}, [DEFAULT_TOPK]),
        ({"queries": ["Oslo Norway Kandy Kandi"], "topk": 2}, [2]),
        ({"queries": ["Oslo Norway Kandy Kandi"], "topk": 1000}, [4]),
        ({"queries": ["Oslo Norway Kandy Kandi"], "topk": 10**30}, [4]),
        ({"queries": ["Oslo", "", "Oslo"], "topk": 1}, [1, 0, 1]),
        ({"queries": []}, []),
        ({"queries": [], "topk": 5, "return_scores": True}, []),
        ({"queries": ["Oslo"], "topk": 1, "unknown": {"field": 1}}, [1]),
        ({"queries": ["Oslo Norway Kandy Kandi"], "topk": "2"}, [2]),
        ({"queries": ["Oslo Norway Kandy Kandi"], "topk": 2.0}, [2]),
        ({"queries": ["Oslo Norway Kandy Kandi"], "topk": True}, [1]),
        ({"queries": ["Oslo"], "topk": 1, "context_tokens": 700, "timeout_s": 20}, [1]),
        ({"queries": ["city"], "topk": 9, "filters": {"lang": "fr"}}, [1]),
        ({"queries": ["Norway city"], "topk": 9, "filters": {"lang": ["fr", "nn"]}}, [2]),
        ({"queries": ["city"], "topk": 9, "filters": {"lang": []}}, [0]),
        ({"queries": ["city"], "topk": 9, "filters": {"lang": True}}, [0]),
        ({"queries": ["city"], "topk": 9, "filters": {}, "mode": None}, [3]),
        ({"queries": ["city", "kandi"], "topk": 9, "mode": "title"}, [0, 1]),
    ],
)
@pytest.mark.parametrize("scores", [False, True])
async def test_bodies_are_accepted_as_other_servers_accept_them(
    client: httpx.AsyncClient, body: dict[str, Any], lengths: list[int], scores: bool
) -> None:
    reply = await client.post("/retrieve", json={**body, "return_scores": scores})
    assert reply.status_code == 200
    assert [len(documents) for documents in reply.json()["result"]] == lengths
    assert "partial" not in reply.json()


async def test_a_document_is_the_whole_row_with_a_score_only_on_request(
    client: httpx.AsyncClient, corpus_file: Path
) -> None:
    row = json.loads(corpus_file.read_text().splitlines()[1])
    bare = (await client.post("/retrieve", json={"queries": ["Oslo"], "topk": 1})).json()
    assert bare == {"result": [[row]]}
    paired = (await client.post("/retrieve", json={"queries": ["Oslo"], "topk": 1, "return_scores": True})).json()
    assert paired["result"][0][0]["document"] == row
    assert paired["result"][0][0]["score"] > 0


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("{", "JSON"),
        ("", "JSON"),
        ("[]", "the body"),
        ("null", "the body"),
        ("{}", "queries: Field required"),
        ('{"queries": null}', "queries"),
        ('{"queries": "Oslo"}', "queries"),
        ('{"queries": [1]}', "queries.0"),
        ('{"queries": [null]}', "queries.0"),
        ('{"query": 1}', "query: "),
        ('{"queries": ["\\ud800"]}', "JSON"),
        ('{"queries": ["Oslo"], "topk": -1}', "topk is -1"),
        ('{"queries": [], "topk": -1}', "topk is -1"),
        ('{"queries": ["Oslo"], "topk": "three"}', "topk"),
        ('{"queries": ["Oslo"], "topk": 2.5}', "topk"),
        ('{"queries": ["Oslo"], "topk": NaN}', "topk"),
        ('{"queries": ["Oslo"], "topk": %s}' % ("9" * 5000), "topk"),
        ('{"queries": ["Oslo"], "return_scores": "maybe"}', "return_scores"),
        ('{"queries": ["Oslo"], "return_scores": null}', "return_scores"),
        ('{"queries": ["Oslo"], "context_tokens": -1}', "context_tokens"),
        ('{"queries": ["Oslo"], "timeout_s": 0}', "timeout_s"),
        ('{"queries": ["Oslo"], "filters": ["lang"]}', "filters"),
        ('{"queries": ["Oslo"], "filters": {"lang": {"a": 1}}}', "filters.lang"),
        ('{"queries": ["Oslo"], "filters": {"colour": "red"}}', "'colour' is unknown"),
        ('{"queries": ["Oslo"], "mode": "dense"}', "mode 'dense' is not served here"),
        ('{"queries": ["Oslo"], "mode": 3}', "mode"),
        ('{"queries": ' + "[" * 100_000, "JSON"),
        (json.dumps({"queries": ["x"] * (retrieval.MAX_QUERIES + 1)}), "split it"),
    ],
)
async def test_an_invalid_body_is_422_with_a_sentence(client: httpx.AsyncClient, body: str, sentence: str) -> None:
    reply = await client.post("/retrieve", content=body)
    assert reply.status_code == 422
    assert sentence in reply.json()["detail"]
    assert len(reply.json()["detail"]) < 500


@pytest.mark.parametrize(("given", "paired"), [(1, True), ("true", True), ("yes", True), (0, False), ("false", False)])
async def test_return_scores_is_read_as_search_r1_reads_it(
    client: httpx.AsyncClient, given: object, paired: bool
) -> None:
    reply = await client.post("/retrieve", json={"queries": ["Oslo"], "topk": 1, "return_scores": given})
    assert ("score" in reply.json()["result"][0][0]) == paired


async def test_a_path_with_a_slash_at_its_end_is_the_same(client: httpx.AsyncClient) -> None:
    for path in ("/retrieve", "/queries"):
        with_slash, without = [await client.post(one, json=CITIES) for one in (f"{path}/", path)]
        assert (with_slash.status_code, with_slash.content) == (200, without.content)


async def test_a_request_of_many_queries_is_answered_whole(client: httpx.AsyncClient) -> None:
    queries = [f"Oslo {number}" for number in range(9000)]
    reply = await client.post("/retrieve", json={"queries": queries, "topk": 1})
    assert [documents[0]["id"] for documents in reply.json()["result"]] == ["o"] * 9000


async def test_a_body_beyond_the_limit_is_413(client: httpx.AsyncClient) -> None:
    reply = await client.post("/retrieve", content=b" " * (http_api.MAX_BODY_BYTES + 1))
    assert reply.status_code == 413


async def test_a_body_that_does_not_arrive_is_408(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_api, "BODY_TIMEOUT_S", 0.05)

    async def iterate_pieces() -> AsyncIterator[bytes]:
        yield b'{"queries": '
        await asyncio.Event().wait()

    assert (await client.post("/retrieve", content=iterate_pieces())).status_code == 408


async def test_every_reply_has_provenance_headers(client: httpx.AsyncClient, loaded: Index) -> None:
    for body in (CITIES, {"queries": []}, {"queries": 1}):
        headers = (await client.post("/retrieve", json=body)).headers
        assert headers["X-Forage-Corpus-Digest"] == loaded.provenance.corpus
        assert headers["X-Forage-Index-Digest"] == loaded.provenance.index
        assert (headers["X-Forage-Encoder-Digest"], headers["X-Forage-Mode"]) == ("", "bm25")
    titled = await client.post("/retrieve", json={**CITIES, "mode": "title"})
    assert titled.headers.get_list("X-Forage-Mode") == ["title"]


async def test_without_an_index_the_reply_says_what_the_service_waits_for() -> None:
    health = Health()
    health.wait_for("start", "reading the corpus")
    async with open_http_client(Retrieval(DEFAULT_TOPK, LONG_S), health) as client:
        reply = await client.post("/retrieve", json=CITIES | {"timeout_s": 0.05})
        assert (reply.status_code, reply.headers["Retry-After"]) == (503, "1")
        assert reply.json() == {"detail": "reading the corpus"}
        assert (await client.get("/healthz")).status_code == 200
        probe = await client.get("/readyz")
        assert (probe.status_code, probe.json()["waiting_for"]) == (503, {"start": "reading the corpus"})
        with waiting("a shard", on="shard 1", limit_s=LONG_S, detail="it loads"):
            (wait,) = (await client.get("/waitz")).json()["waits"]
        assert (wait["what"], wait["on"], wait["detail"]) == ("a shard", "shard 1", "it loads")
        assert 0 < wait["gives_up_in_s"] <= LONG_S
        assert (await client.get("/waitz")).json() == {"waits": []}


async def test_a_failed_search_is_500_without_the_exception_text(loaded: Index) -> None:
    async with open_retrieval(record_bm25(loaded)[0]) as core, open_http_client(core) as client:
        reply = await client.post("/retrieve", json={"queries": ["poison"]})
        assert reply.status_code == 500
        assert "poison" not in reply.text
        assert (await client.post("/retrieve", json=CITIES)).status_code == 200


async def test_overload_and_timeout_are_503_with_retry_after(loaded: Index) -> None:
    index, searches = record_bm25(loaded)
    async with open_retrieval(index, max_waiting=4) as core, open_http_client(core) as client:
        searches.open.clear()
        held = asyncio.create_task(client.post("/retrieve", json={"queries": ["a"]}))
        await asyncio.to_thread(searches.busy.wait)
        late = await client.post("/retrieve", json={"queries": ["b"], "timeout_s": 0.05})
        assert (late.status_code, late.headers["Retry-After"]) == (503, "1")
        assert "took too long" in late.json()["detail"]
        queued = asyncio.create_task(client.post("/retrieve", json={"queries": ["c"]}))
        await wait_until_queued(1)
        full = await client.post("/retrieve", json={"queries": ["d", "e", "f", "g"]})
        assert (full.status_code, full.headers["Retry-After"]) == (503, "1")
        assert "overloaded" in full.json()["detail"]
        searches.open.set()
        assert [(await one).status_code for one in (held, queued)] == [200, 200]
    assert [asked for asked, _ in searches.asked] == [["a"], ["c"]]


async def test_queries_of_a_disconnected_caller_are_not_searched(loaded: Index) -> None:
    index, searches = record_bm25(loaded)
    async with open_retrieval(index) as core:
        searches.open.clear()
        held = asyncio.create_task(core.retrieve(["first"]))
        await asyncio.to_thread(searches.busy.wait)
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": b'{"queries": ["gone"]}', "more_body": False})
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/retrieve", "headers": [], "query_string": b""}
        app = http_api.make_app(core, Health())
        call = asyncio.create_task(app({**scope, "app": app}, messages.get, send))
        await wait_until_queued(1)
        messages.put_nowait({"type": "http.disconnect"})
        await call
        assert sent[0]["status"] == 400
        searches.open.set()
        await held
    assert [asked for asked, _ in searches.asked] == [["first"]]


async def test_the_openapi_page_describes_every_endpoint_body_reply_and_error(client: httpx.AsyncClient) -> None:
    page = (await client.get("/openapi.json")).json()
    probes = {"/healthz", "/readyz", "/waitz", "/metrics"}
    assert set(page["paths"]) == {"/retrieve", "/queries", "/access", "/reload"} | probes
    search = page["paths"]["/retrieve"]["post"]
    bodies = search["requestBody"]["content"]["application/json"]["schema"]["anyOf"]
    assert [set(body["required"]) for body in bodies] == [{"queries"}, {"query"}]
    assert {"topk", "return_scores", "filters", "mode"} <= set(bodies[0]["properties"])
    assert set(search["responses"]) == {"200", "400", "401", "403", "408", "413", "422", "500", "503"}
    assert (await client.get("/docs")).status_code == 200
