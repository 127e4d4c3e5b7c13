"""Batching: which queries share a batch, in which order, cancelled callers and overload."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forage_retriever.hits import Filters, Hit
from forage_retriever.serve import waiting
from forage_retriever.serve.batcher import Batcher, OverloadedError
from forage_retriever.serve.urgency import Urgency
from forage_retriever.serve.waiting import SearchOptions

ASKED = SearchOptions("dense", 1)


class Echo:
    """Finds for each text the row of its length; records its calls, and can be blocked."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.asked: list[SearchOptions] = []
        self.threads: set[int] = set()
        self.open = threading.Event()
        self.busy = threading.Event()

    def search(self, queries: Sequence[str], topk: int, filters: Filters = ()) -> list[list[Hit]]:
        self.busy.set()
        assert self.open.wait(120)
        self.threads.add(threading.get_ident())
        self.batches.append(list(queries))
        self.asked.append(SearchOptions("dense", topk, filters))
        if "poison" in queries:
            raise RuntimeError("poison")
        return [[Hit(len(query), 1.0)] for query in queries]


@asynccontextmanager
async def run_batcher(echo: Echo, max_waiting: int = 10_000) -> AsyncIterator[Batcher]:
    queue = Batcher({"dense": echo}, max_waiting)
    try:
        yield queue
    finally:
        echo.open.set()
        await queue.close()


async def hold_queue(queue: Batcher, echo: Echo, *begins: Callable[[], object]) -> list[object]:
    """Block the search thread at a first query, add others, and unblock it; returns all outcomes."""
    first = asyncio.create_task(queue.search(["first"], ASKED))
    await asyncio.to_thread(echo.busy.wait)
    tasks = [asyncio.create_task(begin()) for begin in begins]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    echo.open.set()
    await first
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_waiting_queries_share_a_batch_and_each_text_is_searched_once() -> None:
    echo = Echo()
    async with run_batcher(echo) as queue:
        await hold_queue(
            queue, echo, *(lambda text=text: queue.search([text], ASKED) for text in ("a", "bb", "a", "ccc"))
        )
    assert echo.batches == [["first"], ["a", "bb", "ccc"]]
    assert threading.get_ident() not in echo.threads
    assert len(echo.threads) == 1


async def test_only_equal_options_share_a_batch_and_queues_take_turns() -> None:
    echo = Echo()
    deep, some = ASKED._replace(topk=9), ASKED._replace(filters=(("lang", ("nb",)),))
    many = [str(number) for number in range(3 * waiting.TURN_QUERIES)]
    async with run_batcher(echo) as queue:
        await hold_queue(
            queue,
            echo,
            lambda: queue.search(many, ASKED),
            lambda: queue.search(["d"], deep),
            lambda: queue.search(["f"], some),
        )
    assert [set(batch) for batch in echo.batches if len(batch) == 1] == [{"first"}, {"d"}, {"f"}]
    assert echo.asked[:4] == [ASKED, ASKED, deep, some]
    assert len(echo.batches) == 5


async def test_a_large_request_does_not_delay_a_small_one() -> None:
    echo = Echo()
    huge = [f"huge {number}" for number in range(4096)]
    async with run_batcher(echo) as queue:
        outcomes = await hold_queue(
            queue, echo, lambda: queue.search(huge, ASKED), lambda: queue.search(["small"], ASKED)
        )
    assert "small" in echo.batches[1]
    assert outcomes == [[[Hit(len(text), 1.0)] for text in huge], [[Hit(5, 1.0)]]]


async def test_a_request_of_at_most_one_turn_is_not_split_by_others() -> None:
    echo = Echo()
    turn = [f"turn {number}" for number in range(waiting.TURN_QUERIES)]
    async with run_batcher(echo) as queue:
        requests = [[f"{text} of {request}" for text in turn] for request in range(4)]
        await hold_queue(queue, echo, *(lambda texts=texts: queue.search(texts, ASKED) for texts in requests))
    assert [text for batch in echo.batches[1:] for text in batch] == [text for texts in requests for text in texts]


async def test_the_longest_trajectory_is_searched_first() -> None:
    echo = Echo()
    async with run_batcher(echo) as queue:
        many = [f"short {number}" for number in range(waiting.TURN_QUERIES * 4)]
        await hold_queue(
            queue,
            echo,
            lambda: queue.search(many, ASKED),
            lambda: queue.search(["unknown"], ASKED),
            lambda: queue.search(["long"], ASKED, Urgency(context_tokens=4000)),
            lambda: queue.search(["longest"], ASKED._replace(topk=2), Urgency(context_tokens=8000)),
        )
    assert echo.batches[1] == ["longest"]
    assert echo.batches[2][0] == "long"
    assert "unknown" in echo.batches[2]


async def test_long_queries_make_small_batches() -> None:
    echo = Echo()
    long = [f"{number} {'word ' * 400}" for number in range(40)]
    async with run_batcher(echo) as queue:
        await hold_queue(queue, echo, lambda: queue.search(long, ASKED))
    assert {len(batch) for batch in echo.batches[1:]} == {waiting.MAX_BATCH_TOKENS // waiting.MAX_QUERY_TOKENS}


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.text(max_size=3000), max_size=150)), max_size=12))
def test_every_caller_gets_its_own_hits_from_bounded_batches(
    requests: list[tuple[int, list[str]]],
) -> None:
    async def run() -> tuple[list[object], Echo]:
        echo = Echo()
        async with run_batcher(echo) as queue:
            begins = [
                lambda texts=texts, topk=topk: queue.search(texts, ASKED._replace(topk=topk + 1))
                for topk, texts in requests
                if texts
            ]
            return await hold_queue(queue, echo, *begins), echo

    replies, echo = asyncio.run(run())
    assert replies == [[[Hit(len(text), 1.0)] for text in texts] for _, texts in requests if texts]
    for batch in echo.batches:
        assert len(batch) <= waiting.MAX_BATCH
        costs = [min(len(text) // waiting.CHARS_PER_TOKEN + 2, waiting.MAX_QUERY_TOKENS) for text in batch]
        assert sum(costs) <= waiting.MAX_BATCH_TOKENS


async def test_queries_of_cancelled_callers_leave_the_queue() -> None:
    echo = Echo()
    async with run_batcher(echo, max_waiting=3) as queue:
        first = asyncio.create_task(queue.search(["first"], ASKED))
        await asyncio.to_thread(echo.busy.wait)
        gone = asyncio.create_task(queue.search(["a", "b", "c"], ASKED))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="3 queries are waiting"):
            await queue.search(["d"], ASKED)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        stays = asyncio.create_task(queue.search(["x", "y", "z"], ASKED))
        await asyncio.sleep(0)
        echo.open.set()
        await asyncio.gather(first, stays)
        assert await queue.search(["e"], ASKED) == [[Hit(1, 1.0)]]
    assert echo.batches == [["first"], ["x", "y", "z"], ["e"]]


async def test_a_failing_query_does_not_fail_others_of_its_batch() -> None:
    echo = Echo()
    async with run_batcher(echo) as queue:
        bad, good = await hold_queue(
            queue, echo, lambda: queue.search(["poison", "also"], ASKED), lambda: queue.search(["good"], ASKED)
        )
        assert await queue.search(["later"], ASKED) == [[Hit(5, 1.0)]]
    assert isinstance(bad, RuntimeError)
    assert good == [[Hit(4, 1.0)]]


async def test_close_answers_waiting_queries_first() -> None:
    echo = Echo()
    queue = Batcher({"dense": echo}, 100)
    ninety = asyncio.create_task(queue.search([str(number) for number in range(90)], ASKED))
    await asyncio.to_thread(echo.busy.wait)
    closing = asyncio.create_task(queue.close())
    await asyncio.sleep(0)
    assert not closing.done()
    echo.open.set()
    await closing
    assert len(await ninety) == 90
