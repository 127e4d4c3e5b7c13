"""The front over real shards: gRPC servers of this process, each with a part of a corpus."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from retriever_parts import LONG_S, Recorder, list_ids, record_bm25
from retriever_servers import open_http_client, serve_merger, serve_shard
from waiting import wait_until_async

from forage_retriever.index import load as index
from forage_retriever.index.load import Index
from forage_retriever.serve import front as fronts
from forage_retriever.serve import shard as shards
from forage_retriever.serve.batcher import OverloadedError
from forage_retriever.serve.front import Front
from forage_retriever.serve.retrieval import NotReadyError
from forage_retriever.serve.source import InvalidRequestError, LocalSource
from forage_runtime.errors import SettingsError
from forage_runtime.settings import RerankSettings, RetrievalMode, RetrieverSettings, Settings
from forage_runtime.telemetry.health import Health

pytestmark = pytest.mark.usefixtures("patient_front")

NAMES = ["Norway", "Oslo", "Bergen", "Kandy", "Colombo", "Galle", "Kandi", "Cotonou"]


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Index, Index]:
    """A corpus in two parts, as BM25 indexes."""
    folder = tmp_path_factory.mktemp("halves")
    shard_addresses = []
    for part, names in enumerate((NAMES[:4], NAMES[4:])):
        file = folder / f"{part}.jsonl"
        rows = [{"id": name, "contents": f'"{name}"\n{name} is a place.', "lang": name[0]} for name in names]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = RetrieverSettings(mode=RetrievalMode.BM25, cache_dir=Path(folder), filter_fields=("lang",))
        shard_addresses.append(index.load_index(file, settings, lambda _: None))
    return shard_addresses[0], shard_addresses[1]


def is_up(address: str) -> bool:
    return REGISTRY.get_sample_value("forage_retriever_shard_up", {"shard": address}) == 1


async def test_the_front_merges_the_best_hits_of_all_shards(
    halves: tuple[Index, Index], free_address: Callable[[], str]
) -> None:
    first, second = free_address(), free_address()
    async with serve_shard(halves[0], first), serve_shard(halves[1], second), serve_merger(first, second) as core:
        results = await core.retrieve(["Galle", "oslo", "place"], 8)
        assert [best[0] for best in list_ids(results)[:2]] == ["Galle", "Oslo"]
        assert sorted(list_ids(results)[2]) == sorted(NAMES)
        scores = [[hit.score for hit in one.hits] for one in results.per_query]
        assert scores == [sorted(one, reverse=True) for one in scores]
        ((kandy, kandi),) = [one for one in list_ids(await core.retrieve(["place"], 9, (("lang", ("K",)),)))]
        assert (kandy, kandi) == ("Kandy", "Kandi")
        assert list_ids(await core.retrieve(["colombo"], mode="title")) == [["Colombo"]]
        assert not results.partial
        assert results.provenance.mode == "bm25"
        async with open_http_client(core) as client:
            ((document,),) = (await client.post("/retrieve", json={"queries": ["Galle"], "topk": 1})).json()["result"]
        assert document == {"id": "Galle", "contents": '"Galle"\nGalle is a place.', "lang": "G"}
        assert results.per_query[0].passages.contents[0] == document["contents"]
        swapped = replace(halves[1], provenance=replace(halves[1].provenance, index="new"))
    async with serve_shard(halves[0], first), serve_shard(swapped, second), serve_merger(first, second) as core:
        other = (await core.retrieve(["Galle"])).provenance
        assert other.index != results.provenance.index
        assert other.corpus == results.provenance.corpus


async def test_partial_answers_are_not_cached_while_a_shard_is_unavailable(
    halves: tuple[Index, Index], free_address: Callable[[], str]
) -> None:
    first, second = free_address(), free_address()
    async with AsyncExitStack() as rest:
        await rest.enter_async_context(serve_shard(halves[0], first))
        async with AsyncExitStack() as mortal:
            await mortal.enter_async_context(serve_shard(halves[1], second))
            core = await rest.enter_async_context(serve_merger(first, second))
            client = await rest.enter_async_context(open_http_client(core))
            assert not (await core.retrieve(["Oslo Galle"])).partial
        partial = await client.post("/retrieve", json={"queries": ["place"], "topk": 9})
        assert partial.json()["partial"] is True
        assert partial.headers["X-Forage-Partial"] == "1"
        assert {row["id"] for row in partial.json()["result"][0]} == set(NAMES[:4])
        await wait_until_async(lambda: not is_up(second))
        async with serve_shard(halves[1], second):
            await wait_until_async(lambda: is_up(second))
            whole = await client.post("/retrieve", json={"queries": ["place"], "topk": 9})
            assert {row["id"] for row in whole.json()["result"][0]} == set(NAMES)
            assert "partial" not in whole.json()
            assert "X-Forage-Partial" not in whole.headers


async def test_the_front_is_not_ready_without_shards(
    halves: tuple[Index, Index], free_address: Callable[[], str]
) -> None:
    address = free_address()
    async with AsyncExitStack() as rest:
        async with serve_shard(halves[0], address):
            core = await rest.enter_async_context(serve_merger(address))
            await core.retrieve(["Oslo"])
        core.drain()  # else the request waits for a shard as long as its caller does
        with pytest.raises(NotReadyError):
            await core.retrieve(["Norway"])


async def test_a_slow_shard_is_omitted_and_its_circuit_opens(
    halves: tuple[Index, Index], free_address: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fronts, "SHARD_TIMEOUT_S", 0.05)
    monkeypatch.setattr(shards, "PROBE_S", LONG_S)  # no probe closes the circuit
    first, second = free_address(), free_address()
    slow, searches = record_bm25(halves[1])
    async with serve_shard(halves[0], first), serve_shard(slow, second), serve_merger(first, second) as core:
        source = core._source
        assert isinstance(source, Front)
        answer = source._shards[0].search
        monkeypatch.setattr(
            source._shards[0], "search", lambda *asked: answer(*asked[:2], replace(asked[2], timeout_s=LONG_S))
        )
        searches.open.clear()
        for number in range(5):
            results = await core.retrieve([f"place {number}"], 9)
            assert (results.partial, set(list_ids(results)[0])) == (True, set(NAMES[:4]))
        calls = {"shard": second, "code": "DEADLINE_EXCEEDED"}
        assert REGISTRY.get_sample_value("forage_retriever_shard_failures_total", calls) == shards.FAILURES_TO_OPEN
        searches.open.set()


async def test_errors_of_a_shard_are_passed_on(halves: tuple[Index, Index], free_address: Callable[[], str]) -> None:
    first, second = free_address(), free_address()
    slow, searches = record_bm25(halves[1])
    async with (
        serve_shard(halves[0], first),
        serve_shard(slow, second, max_waiting=2) as shard,
        serve_merger(first, second) as core,
    ):
        with pytest.raises(InvalidRequestError, match="'colour' is unknown"):
            await core.retrieve(["Oslo"], filters=(("colour", ("red",)),))
        with pytest.raises(InvalidRequestError, match="mode 'dense' is not served"):
            await core.retrieve(["Oslo"], mode="dense")
        searches.busy.clear()
        searches.open.clear()
        held = asyncio.create_task(core.retrieve(["a"]))
        await asyncio.to_thread(searches.busy.wait)
        queued = asyncio.create_task(core.retrieve(["b", "c"]))
        await wait_until_async(lambda: shard._source._batcher._requests.queries == 2)  # type: ignore[union-attr]
        with pytest.raises(OverloadedError, match=f"shard {second}"):
            await core.retrieve(["d"])
        with pytest.raises(OverloadedError, match="3 queries are waiting"):
            await core.retrieve([str(number) for number in range(101)])
        searches.open.set()
        await asyncio.gather(held, queued)
        with pytest.raises(InvalidRequestError, match="merges shards"):
            await core.find_pages(["https://example.org"])
        assert not (await core.retrieve(["Oslo"])).partial


async def test_a_large_request_is_searched_in_parts(
    halves: tuple[Index, Index], free_address: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fronts, "PART_QUERIES", 3)
    first, second = free_address(), free_address()
    recorded, searches = record_bm25(halves[0])
    async with serve_shard(recorded, first), serve_shard(halves[1], second), serve_merger(first, second) as core:
        assert list_ids(await core.retrieve(NAMES, 1)) == [[name] for name in NAMES]
    assert [queries for queries, _ in searches.asked] == [NAMES[:3], NAMES[3:6], NAMES[6:]]


async def test_a_shard_with_another_encoder_is_not_merged(
    halves: tuple[Index, Index], free_address: Callable[[], str]
) -> None:
    first, second = free_address(), free_address()
    strange = replace(halves[1], provenance=replace(halves[1].provenance, encoder="other"))
    async with serve_shard(halves[0], first), serve_shard(strange, second), serve_merger(first, second) as core:
        results = await core.retrieve(["place"], 9)
        assert (results.partial, set(list_ids(results)[0])) == (True, set(NAMES[:4]))


async def test_a_new_index_of_a_shard_invalidates_cached_answers(
    halves: tuple[Index, Index], free_address: Callable[[], str]
) -> None:
    address = free_address()
    async with serve_shard(halves[0], address) as served, serve_merger(address) as core:
        before = await core.retrieve(["place"], 1)
        changed, searches = record_bm25(halves[1])
        served.set_source(LocalSource(changed, 100))
        both = await core.retrieve(["place", "Galle"], 1)
        assert both.provenance != before.provenance
        assert list_ids(both) == [["Colombo"], ["Galle"]]
        assert isinstance(searches, Recorder)


async def test_a_front_refuses_settings_that_need_a_corpus() -> None:
    settings = RetrieverSettings(shards=("127.0.0.1:1",), rerank=RerankSettings(model="http://127.0.0.1:2"))
    with pytest.raises(SettingsError, match="rerank in the shards"):
        Front(Settings(retriever=settings), Health())
