"""Requests, cache, errors and replacement of the index, over a real BM25 index."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from sys import getsizeof

import pytest
from retriever_parts import DEFAULT_TOPK, LONG_S, Recorder, list_ids, open_retrieval, record_bm25

from forage_retriever.index.load import Index
from forage_retriever.serve import retrieval
from forage_retriever.serve.cache import LruCache
from forage_retriever.serve.retrieval import NotReadyError, Retrieval
from forage_retriever.serve.source import InvalidRequestError, LocalSource
from forage_retriever.serve.urgency import Urgency
from forage_runtime.errors import UnavailableError


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "AGAIN_S", 0.0)


@pytest.fixture
def recorder(loaded: Index) -> tuple[Index, Recorder]:
    return record_bm25(loaded)


@pytest.fixture
async def core(recorder: tuple[Index, Recorder]) -> AsyncIterator[Retrieval]:
    async with open_retrieval(recorder[0]) as made:
        yield made


@pytest.mark.parametrize(("topk", "given"), [(0, DEFAULT_TOPK), (2, 2), (1000, 4), (10**30, 4)])
async def test_topk_is_limited_by_the_request_and_the_corpus(core: Retrieval, topk: int, given: int) -> None:
    assert [len(hits) for hits in list_ids(await core.retrieve(["Oslo Norway Kandy Kandi"], topk))] == [given]


async def test_filters_restrict_the_hits(core: Retrieval) -> None:
    (hits,) = list_ids(await core.retrieve(["city Norway"], 5, (("lang", ("fr", "nb")),)))
    assert sorted(hits) == ["7", "o"]
    assert list_ids(await core.retrieve(["city Norway"], 5, (("lang", ("fr",)), ("url", ("none",))))) == [[]]


async def test_a_request_may_choose_a_mode_and_the_reply_names_it(core: Retrieval) -> None:
    titled = await core.retrieve(["kandy"], 3, mode="title")
    assert (list_ids(titled), titled.provenance.mode) == ([["k"]], "title")
    assert (await core.retrieve(["kandy"])).provenance.mode == "bm25"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"topk": -1}, "topk is -1: give a positive number"),
        ({"queries": ["x"] * (retrieval.MAX_QUERIES + 1)}, "split it"),
        ({"mode": "dense"}, "mode 'dense' is not served here: this index has .*bm25"),
        ({"filters": (("colour", ("red",)),)}, "'colour' is unknown: .* lang, url"),
        ({"filters": (("lang", ("x",) * 1001),)}, "1001 filter values are more than 1000"),
    ],
)
async def test_invalid_requests_are_refused_with_a_sentence(
    core: Retrieval, arguments: dict[str, object], sentence: str
) -> None:
    with pytest.raises(InvalidRequestError, match=sentence):
        await core.retrieve(**{"queries": ["Oslo"], **arguments})  # type: ignore[arg-type]


async def test_requests_for_too_many_documents_are_refused(core: Retrieval, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "MAX_DOCUMENTS", 7)
    with pytest.raises(InvalidRequestError, match="2 queries of 4 documents"):
        await core.retrieve(["a", "b"], 4)
    assert len((await core.retrieve(["a"], 6)).per_query) == 1


async def test_the_same_query_is_searched_once_even_without_hits(
    core: Retrieval, recorder: tuple[Index, Recorder]
) -> None:
    first = await core.retrieve(["Oslo", "zzzz", "Oslo"], 2)
    assert list_ids(first) == [["o", "n"], [], ["o", "n"]]
    assert list_ids(await core.retrieve(["zzzz", "Oslo"], 2)) == [[], ["o", "n"]]
    assert recorder[1].asked == [(["Oslo", "zzzz"], 2)]


async def test_topk_mode_and_filters_are_part_of_the_cache_key(
    core: Retrieval, recorder: tuple[Index, Recorder]
) -> None:
    await core.retrieve(["Oslo"], 1)
    await core.retrieve(["Oslo"], 2)
    assert list_ids(await core.retrieve(["Oslo"], 2, (("lang", ("fr",)),))) == [[]]
    assert list_ids(await core.retrieve(["Oslo"], 2, mode="title")) == [["o"]]
    assert len(recorder[1].asked) == 3


async def test_a_search_times_out_and_the_next_one_is_answered(
    recorder: tuple[Index, Recorder],
) -> None:
    index, searches = recorder
    async with open_retrieval(index, timeout_s=0.05) as core:
        searches.open.clear()
        with pytest.raises(TimeoutError):
            await core.retrieve(["Oslo"])
        core._timeout_s = LONG_S
        with pytest.raises(TimeoutError):
            await core.retrieve(["Norway"], urgency=Urgency(timeout_s=0.05))
        searches.open.set()
        assert list_ids(await core.retrieve(["Kandy"], 1)) == [["k"]]


async def test_without_an_index_and_after_stop_retrieval_is_not_ready(loaded: Index) -> None:
    core = Retrieval(DEFAULT_TOPK, 0.05)
    for queries in (["Oslo"], []):
        with pytest.raises(NotReadyError):
            await core.retrieve(queries)
    core._timeout_s = LONG_S
    core.set_source(LocalSource(loaded, 100))
    await core.retrieve(["Oslo"])
    await core.stop()
    with pytest.raises(NotReadyError):
        await core.retrieve(["Oslo"])


async def test_a_request_waits_for_the_index_as_long_as_its_caller_does(loaded: Index) -> None:
    core = Retrieval(DEFAULT_TOPK, LONG_S)
    with pytest.raises(NotReadyError):  # a probe
        await core.retrieve([])
    with pytest.raises(NotReadyError):
        await core.retrieve(["Oslo"], urgency=Urgency(timeout_s=0.01))
    early = asyncio.create_task(core.retrieve(["Oslo"], 1))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not early.done()
    core.set_source(LocalSource(loaded, 100))
    assert list_ids(await early) == [["o"]]
    await core.stop()


async def test_a_request_that_waits_for_an_index_ends_with_the_service() -> None:
    core = Retrieval(DEFAULT_TOPK, LONG_S)
    early = asyncio.create_task(core.retrieve(["Oslo"]))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not early.done()
    core.drain()
    with pytest.raises(NotReadyError):
        await early


async def test_a_request_waits_for_an_encoder_that_is_down(recorder: tuple[Index, Recorder]) -> None:
    index, searches = recorder
    searches.down = 2
    async with open_retrieval(index) as core:
        assert list_ids(await core.retrieve(["Oslo"], 1)) == [["o"]]
        searches.down = 10**9
        with pytest.raises(UnavailableError, match="the encoder is down"):
            await core.retrieve(["Kandy"], urgency=Urgency(timeout_s=0.05))


async def test_a_replaced_index_finishes_its_searches_and_is_closed(loaded: Index) -> None:
    old, searches = record_bm25(loaded)
    new = replace(loaded, provenance=replace(loaded.provenance, index="new"))
    core = Retrieval(DEFAULT_TOPK, LONG_S)
    core.set_source(LocalSource(old, 100))
    searches.open.clear()
    before = asyncio.create_task(core.retrieve(["Oslo"], 1))
    await asyncio.to_thread(searches.busy.wait)
    core.set_source(LocalSource(new, 100))
    after = await core.retrieve(["Oslo"], 1)
    assert after.provenance.index == "new"
    assert not before.done()
    searches.open.set()
    assert (await before).provenance.index == loaded.provenance.index
    gone = weakref.ref(searches)
    del before, old, searches
    await asyncio.gather(*core._retiring)
    await core.stop()
    # A thread that has searched lets go of what it searched only after its result is known.
    while gone() is not None:
        await asyncio.to_thread(lambda: None)


async def test_late_results_of_a_replaced_index_are_not_cached(loaded: Index) -> None:
    old, searches = record_bm25(loaded)
    async with open_retrieval(old) as core:
        searches.open.clear()
        late = asyncio.create_task(core.retrieve(["Oslo"], 1))
        await asyncio.to_thread(searches.busy.wait)
        same, again = record_bm25(loaded)
        core.set_source(LocalSource(same, 100))
        searches.open.set()
        await late
        await core.retrieve(["Oslo"], 1)
        assert again.asked == [(["Oslo"], 1)]


def test_the_cache_evicts_the_least_recently_used_entry() -> None:
    cache: LruCache[str, int] = LruCache(200)
    cache.put("a", 1, 1)
    for number in range(2, 201):
        cache.put(str(number), number, 1)
    assert (cache.get("a"), cache.bytes) == (1, 200)
    cache.put("b", 2, 2)
    assert (cache.get("a"), cache.get("2"), cache.get("3"), cache.get("4")) == (1, None, None, 4)
    assert (len(cache), cache.bytes) == (199, 200)
    cache.put("b", 3, 1)
    assert (cache.get("b"), cache.bytes) == (3, 199)


def test_an_entry_that_would_evict_many_is_not_kept() -> None:
    cache: LruCache[str, int] = LruCache(1000)
    cache.put("small", 1, 10)
    cache.put("large", 2, 11)
    assert (cache.get("small"), cache.get("large")) == (1, None)
    none: LruCache[str, int] = LruCache(0)
    none.put("a", 1, 1)
    assert (none.get("a"), none.bytes) == (None, 0)


async def test_the_cache_stays_within_its_bytes_whatever_is_asked_for(loaded: Index) -> None:
    """Callers need no token to ask for many passages."""
    core = Retrieval(DEFAULT_TOPK, LONG_S, 200_000)
    core.set_source(LocalSource(loaded, 100))
    cache = core._cache
    for number in range(0, 3000, 100):
        queries = [f"Oslo {one}" for one in range(number, number + 100)]
        await core.retrieve(queries, 2**31 - 1)
        filters = (("year", tuple(f"{one:01000}" for one in range(2))),)
        with suppress(InvalidRequestError):
            await core.retrieve(queries[:3], 1, filters)
        assert cache.bytes <= 200_000
    entries = cache._values.items()
    assert sum(getsizeof(key[2]) + sum(map(getsizeof, value.hits)) for key, (value, _) in entries) <= cache.bytes
    await core.stop()
