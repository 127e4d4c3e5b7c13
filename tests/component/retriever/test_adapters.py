"""Requests and replies of other search agents' clients."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from retriever_parts import open_retrieval
from retriever_servers import open_http_client

from forage_retriever.index.load import Index

KANDY = {"id": "k", "contents": '"Kandy"\nKandy is a city in Sri Lanka.', "url": "https://example.org/kandy"}


@pytest.fixture
async def client(loaded: Index) -> AsyncIterator[httpx.AsyncClient]:
    async with open_retrieval(loaded) as core, open_http_client(core) as client:
        yield client


async def test_skyrl_sends_one_query_and_reads_a_list_of_results(client: httpx.AsyncClient) -> None:
    body = {"query": "Kandy", "topk": 1, "return_scores": True}
    ((pair,),) = (await client.post("/retrieve", json=body)).json()["result"]
    assert pair["document"] == KANDY
    assert pair["score"] > 0
    bare = await client.post("/retrieve", json={"query": "Kandy", "topk": 1})
    assert bare.json() == {"result": [[KANDY]]}


@pytest.mark.parametrize("limit", ["top_k", "k"])
async def test_rllm_reads_flat_results_with_scores(client: httpx.AsyncClient, limit: str) -> None:
    reply = (await client.post("/retrieve", json={"query": '"Kandy" Sri Lanka', limit: 2})).json()
    assert (reply["query"], reply["method"], reply["num_results"]) == ('"Kandy" Sri Lanka', "bm25", 2)
    assert [set(result) for result in reply["results"]] == [{"document", "score"}] * 2
    assert reply["results"][0]["document"] == KANDY
    assert (await client.get("/health")).status_code == 200


async def test_r1_searcher_reads_answers_with_a_leading_number(client: httpx.AsyncClient) -> None:
    reply = (await client.post("/queries", json={"queries": ["Kandy", "zzzz"], "k": 1})).json()
    assert reply["queries"] == ["Kandy", "zzzz"]
    number, _, text = reply["answers"][0][0].partition("\t")
    assert (number.isdecimal(), text) == (True, KANDY["contents"])
    assert reply["answers"][1] == []
    assert len((await client.post("/queries", json={"queries": ["city"]})).json()["answers"][0]) == 3


async def test_asearcher_reads_pages_by_url(client: httpx.AsyncClient) -> None:
    reply = await client.post("/access", json={"urls": [KANDY["url"], "https://example.org/none"]})
    assert reply.json() == {"result": [{"url": KANDY["url"], "contents": KANDY["contents"]}, None]}
    assert (await client.post("/access", json={"urls": ["x"] * 65})).status_code == 422
    assert "urls" in (await client.post("/access", json={"urls": "x"})).json()["detail"]


async def test_filters_and_modes_work_in_every_body(client: httpx.AsyncClient) -> None:
    reply = await client.post("/retrieve", json={"query": "city", "filters": {"lang": "fr"}})
    assert [row["id"] for row in reply.json()["result"][0]] == [7]
    reply = await client.post("/queries", json={"queries": ["kandy"], "mode": "title"})
    assert len(reply.json()["answers"][0]) == 1
    assert reply.headers["X-Forage-Mode"] == "title"
