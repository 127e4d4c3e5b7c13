"""The retriever's client against a real server that fails on order, and the circuit that guards it."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from failing_server import (
    HANG,
    NOT_HTTP,
    RESET,
    ROW,
    FailingServer,
    Order,
    Reply,
    build_reply,
    one_search_a_request,
    server,
)
from hypothesis import given
from hypothesis import strategies as st
from loop_clock import LoopClock, loop_clock
from waiting import wait_until_async

from forage_proto.v1.trajectory_pb2 import Document, Provenance
from forage_runtime.clients import calls
from forage_runtime.clients.calls import MalformedReplyError, RefusedError
from forage_runtime.clients.circuit import FAILURES, OPENED, Circuit, CircuitOpenError
from forage_runtime.clients.concurrency import QUEUED
from forage_runtime.clients.retriever import RetrieverClient, searching_for
from forage_runtime.errors import UnavailableError
from forage_runtime.telemetry.waits import list_waits

LONG_S = 300.0
"""Limit of what must not end by its limit."""
__all__ = ["loop_clock", "one_search_a_request", "server"]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def is_calling(client: RetrieverClient) -> bool:
    """Whether an attempt is under way."""
    return len(client._lanes._free) < len(client._lanes._all)


def open_client(server: FailingServer, timeout_s: float = LONG_S) -> RetrieverClient:
    return RetrieverClient(server.address, timeout_s)


async def test_searches_send_all_fields_and_return_documents_over_one_connection(server: FailingServer) -> None:
    server.orders = [
        build_reply(
            {"result": [[ROW], []]}, X_Forage_Index_Digest="i", X_Forage_Corpus_Digest="c", X_Forage_Mode="bm25"
        ),
        build_reply({"result": [[]], "partial": True}, X_Forage_Partial="1"),
    ]
    async with open_client(server) as retriever:
        results = await retriever.search(["a", "ü"], topk=5, filters={"lang": "en", "year": ["1", "2"]}, mode="dense")
        later = await retriever.search(["b"])
    assert results.documents == [[Document(id="7", contents='"T"\ntext', score=0.5)], []]
    assert (results.provenance, results.partial) == (
        Provenance(corpus_digest="c", index_digest="i", mode="bm25"),
        False,
    )
    assert (later.documents, later.provenance, later.partial) == ([[]], Provenance(), True)
    filters = {"lang": "en", "year": ["1", "2"]}
    sent = [request.pop("timeout_s") for request in server.requests]
    assert all(LONG_S / 2 < limit <= LONG_S - 1 for limit in sent), "a second before the client"
    assert server.requests == [
        {"queries": ["a", "ü"], "return_scores": True, "topk": 5, "filters": filters, "mode": "dense"},
        {"queries": ["b"], "return_scores": True},
    ]
    assert server.connections == 1


async def test_connections_outlast_a_training_step(server: FailingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new connection costs a handshake under TLS, and a step begins with as many as it has searches at once."""
    passed = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed)
    monkeypatch.setattr("httpcore._async.http11.time", clock)
    async with open_client(server) as retriever:
        await retriever.search(["a"])
        passed = 50.0
        await retriever.search(["a"])
    assert server.connections == 1


@pytest.mark.parametrize(
    "failure",
    [
        RESET,
        NOT_HTTP,
        build_reply(status=500),
        build_reply(status=502),
        build_reply(status=503),
        build_reply(status=429),
    ],
)
async def test_transient_failures_are_retried(server: FailingServer, failure: Order) -> None:
    server.orders = [failure, failure, build_reply()]
    retried = read_total(calls.RETRIED)
    async with open_client(server) as retriever:
        assert (await retriever.search(["a"])).documents[0][0].id == "7"
    assert len(server.requests) == 3
    assert read_total(calls.RETRIED) == retried + 2


@pytest.mark.usefixtures("one_search_a_request")
async def test_retry_after_is_respected_and_never_opens_the_circuit(server: FailingServer) -> None:
    later = build_reply(status=503, Retry_After="1")
    server.orders = [*[later] * (2 * FAILURES), build_reply()]
    opened = read_total(OPENED)
    async with open_client(server) as retriever:
        await asyncio.gather(*(retriever.search(["a"]) for _ in range(2 * FAILURES)))
    assert len(server.requests) == 4 * FAILURES
    assert server.times[2 * FAILURES] - server.times[0] >= 1.0
    assert read_total(OPENED) == opened


async def test_a_search_says_how_long_the_trajectory_is_that_waits(server: FailingServer) -> None:
    async with open_client(server) as retriever:
        with searching_for(1234):
            await asyncio.create_task(retriever.search(["a"]))
        await retriever.search(["b"])
    assert [request.get("context_tokens") for request in server.requests] == [1234, None]


async def test_each_attempt_says_what_is_left_of_the_deadline(server: FailingServer) -> None:
    server.orders = [build_reply(status=503, retry_after="1"), build_reply()]
    async with open_client(server) as retriever:
        await retriever.search(["a"])
    first, second = (request["timeout_s"] for request in server.requests)
    assert first - second >= 1


@pytest.mark.parametrize(
    ("order", "timeout_s"), [(HANG, 0.3), (build_reply(status=503, Retry_After="3600"), LONG_S)], ids=[HANG, "later"]
)
async def test_the_deadline_covers_all_attempts(server: FailingServer, order: Order, timeout_s: float) -> None:
    server.orders = [order]
    given_up = read_total(calls.GIVEN_UP)
    async with open_client(server, timeout_s) as retriever:
        with pytest.raises(UnavailableError, match=rf"at 127.0.0.1:\d+ gave no answer within {timeout_s:g} s"):
            await retriever.search(["a"])
    assert len(server.requests) <= 1
    assert read_total(calls.GIVEN_UP) == given_up + 1


async def test_a_rejected_request_is_not_retried_and_its_error_has_the_reason(server: FailingServer) -> None:
    server.orders = [build_reply({"detail": "topk is -1"}, 422)]
    async with open_client(server) as retriever:
        for _ in range(FAILURES + 1):
            with pytest.raises(RefusedError, match=r"rejected a search \(422\).*topk is -1"):
                await retriever.search(["a"])
    assert len(server.requests) == FAILURES + 1


@pytest.mark.parametrize(
    "order",
    [
        build_reply(b"<html>"),
        build_reply([1]),
        build_reply({"result": []}),
        build_reply({"result": [[{"id": "bare"}]]}),
        build_reply({"result": [[{"document": {"id": "a", "contents": None}, "score": 1}]]}),
        build_reply(b"[" * 100_000),
        build_reply(b"no gzip", Content_Encoding="gzip"),
    ],
)
async def test_a_malformed_reply_is_an_error_of_its_own_and_not_retried(server: FailingServer, order: Order) -> None:
    server.orders = [order]
    async with open_client(server) as retriever:
        with pytest.raises(MalformedReplyError, match=r"is it a retriever's address|is compressed"):
            await retriever.search(["a"])
    assert len(server.requests) == 1


@pytest.mark.usefixtures("one_search_a_request")
async def test_an_open_circuit_sends_no_call_until_a_probe_succeeds(server: FailingServer) -> None:
    server.orders = [RESET]
    opened = read_total(OPENED)
    clock = Clock()
    async with open_client(server) as patient:
        patient._circuit = Circuit("retriever", server.address, open_s=0.05, clock=clock)
        waiting = [asyncio.create_task(patient.search([str(n)])) for n in range(20)]
        await wait_until_async(lambda: read_total(OPENED) == opened + 1 and not is_calling(patient))
        tried = len(server.requests)
        server.orders = [RESET, build_reply()]
        await asyncio.sleep(0.2)  # the time of several pauses
        assert len(server.requests) == tried, "nobody calls while it is open"
        clock.now += 1
        await wait_until_async(lambda: read_total(OPENED) == opened + 2 and not is_calling(patient))
        await asyncio.sleep(0.2)
        assert len(server.requests) == tried + 1, "a probe failed, and it is open again"
        clock.now += 1
        results = await asyncio.gather(*waiting)
    assert len({json.dumps(request) for request in server.requests[-20:]}) == 20
    assert len(results) == 20
    assert len(server.requests) == tried + 1 + 20
    assert read_total(OPENED) == opened + 2


@pytest.mark.usefixtures("one_search_a_request")
async def test_a_deadline_before_the_circuit_closes_fails_without_a_call(server: FailingServer) -> None:
    server.orders = [RESET]
    async with open_client(server) as hasty:
        hasty._circuit = Circuit("retriever", server.address, open_s=2 * LONG_S)
        await asyncio.gather(*(hasty.search(["a"]) for _ in range(FAILURES)), return_exceptions=True)
        tried = len(server.requests)
        with pytest.raises(UnavailableError, match="no calls for"):
            await hasty.search(["a"])
    assert len(server.requests) == tried


def find_by_query(request: dict[str, Any]) -> Reply:
    """One document for each query, with the query's upper-case letter as its id."""
    documents = [{"id": query.upper(), "contents": query} for query in request["queries"]]
    return build_reply({"result": [[ROW | {"document": document}] for document in documents]})


async def search_together(retriever: RetrieverClient, *queries: str, **options: Any) -> list[str]:
    results = await asyncio.gather(*(retriever.search([query], **options) for query in queries))
    return [result.documents[0][0].id for result in results]


async def test_searches_that_begin_together_go_in_one_request_and_each_gets_its_own(server: FailingServer) -> None:
    server.orders = [find_by_query]
    async with open_client(server) as retriever:
        assert await search_together(retriever, "a", "b", "c") == ["A", "B", "C"]
        apart = await asyncio.gather(
            search_together(retriever, "d", topk=1), search_together(retriever, "e", filters={"lang": "en"})
        )
    assert apart == [["D"], ["E"]], "what asks for something else goes alone"
    assert server.requests[0]["queries"] == ["a", "b", "c"]
    assert sorted(request["queries"] for request in server.requests[1:]) == [["d"], ["e"]]


async def test_the_longest_trajectories_go_first_and_say_so(
    server: FailingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forage_runtime.clients.retriever.MERGED", 2)
    server.orders = [find_by_query]

    async def search(query: str, context_tokens: int) -> None:
        with searching_for(context_tokens):
            await retriever.search([query])

    async with open_client(server) as retriever:
        lengths = {"a": 10, "b": 4000, "c": 300, "d": 2000}
        await asyncio.gather(*(search(query, length) for query, length in lengths.items()))
    sent = {tuple(request["queries"]): request["context_tokens"] for request in server.requests}
    assert sent == {("b", "d"): 4000, ("c", "a"): 300}


async def test_one_that_is_rejected_is_no_others_fault(server: FailingServer) -> None:
    server.orders = [
        lambda request: build_reply({"detail": "no such query"}, 422) if "b" in request["queries"] else build_reply()
    ]
    async with open_client(server) as retriever:
        results = await asyncio.gather(*(retriever.search([query]) for query in "abc"), return_exceptions=True)
    assert [isinstance(result, RefusedError) for result in results] == [False, True, False]
    assert sorted(request["queries"] for request in server.requests) == [["a"], ["a", "b", "c"], ["b"], ["c"]]


@pytest.mark.parametrize(("bad", "error"), [("\ud800", UnicodeEncodeError), (b"bytes", TypeError)])
async def test_one_that_cannot_be_sent_is_no_others_fault(server: FailingServer, bad: Any, error: type) -> None:
    async with open_client(server) as retriever:
        results = await asyncio.gather(*(retriever.search([query]) for query in ("a", bad)), return_exceptions=True)
    assert [isinstance(result, error) for result in results] == [False, True]
    assert [request["queries"] for request in server.requests] == [["a"]]


async def test_one_that_finds_what_is_malformed_is_no_others_fault(server: FailingServer) -> None:
    nothing = ROW | {"document": {"id": "b", "contents": None}}
    server.orders = [
        lambda request: build_reply({"result": [[nothing if query == "b" else ROW] for query in request["queries"]]})
    ]
    async with open_client(server) as retriever:
        results = await asyncio.gather(*(retriever.search([query]) for query in "abc"), return_exceptions=True)
    assert [isinstance(result, MalformedReplyError) for result in results] == [False, True, False]


async def test_each_of_them_learns_why_there_is_no_answer(server: FailingServer) -> None:
    server.orders = [HANG]
    async with open_client(server, 0.3) as retriever:
        errors = await asyncio.gather(*(retriever.search([query]) for query in "ab"), return_exceptions=True)
    assert all(isinstance(error, UnavailableError) for error in errors)
    assert len(server.requests) == 1


async def test_filters_that_change_later_are_another_search(server: FailingServer) -> None:
    filters = {"year": "1"}
    async with open_client(server) as retriever:
        search = asyncio.create_task(retriever.search(["a"], filters=filters))
        await asyncio.sleep(0)
        filters["year"] = "2"
        await search
    assert [request["filters"] for request in server.requests] == [{"year": "1"}]


async def test_what_is_cancelled_before_it_is_sent_is_not_sent(server: FailingServer) -> None:
    server.orders = [find_by_query]
    async with open_client(server) as retriever:
        first, second = (asyncio.create_task(retriever.search([query])) for query in "ab")
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).documents[0][0].id == "B"
    assert [request["queries"] for request in server.requests] == [["b"]]


async def test_a_request_goes_on_for_those_who_still_wait_and_ends_with_the_last(server: FailingServer) -> None:
    server.hold()
    server.orders = [find_by_query]
    async with open_client(server) as retriever:
        first, second = (asyncio.create_task(retriever.search([query])) for query in "ab")
        await wait_until_async(lambda: len(server.requests) == 1)
        first.cancel()
        server.release(1)
        assert (await second).documents[0][0].id == "B"
        both = [asyncio.create_task(retriever.search([query])) for query in "ab"]
        await wait_until_async(lambda: len(server.requests) == 2)
        assert is_calling(retriever)
        for one in both:
            one.cancel()
        await wait_until_async(lambda: not is_calling(retriever))


async def test_a_closed_client_leaves_nobody_waiting(server: FailingServer) -> None:
    server.orders = [HANG]
    retriever = open_client(server)
    search = asyncio.create_task(retriever.search(["a"]))
    await wait_until_async(lambda: len(server.requests) == 1)
    await retriever.close()
    with pytest.raises(asyncio.CancelledError):
        await search


@pytest.mark.parametrize("turns", range(1, 4))
async def test_a_client_that_is_closed_before_its_request_begins_leaves_nobody_waiting(
    server: FailingServer, turns: int
) -> None:
    server.orders = [HANG]
    retriever = open_client(server)
    search = asyncio.create_task(retriever.search(["a"]))
    for _ in range(turns):  # of the event loop
        await asyncio.sleep(0)
    await retriever.close()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(search, 10)


def try_circuit(circuit: Circuit, error: BaseException | None) -> bool:
    """Whether an attempt that ends like this was made."""
    try:
        with circuit.attempt():
            if error is not None:
                raise error
    except CircuitOpenError:
        return False
    except (httpx.ConnectError, ValueError, asyncio.CancelledError) as raised:
        return raised is error
    return True


AWAY, ANSWERED, CANCELLED = httpx.ConnectError("away"), ValueError("a refusal"), asyncio.CancelledError()
ENDS = st.sampled_from([None, AWAY, ANSWERED, CANCELLED])


@given(st.lists(st.tuples(ENDS, st.sampled_from([0.0, 0.6, 1.0])), max_size=40), st.integers(1, 3))
def test_a_circuit_opens_after_failures_and_closes_after_a_successful_probe(
    history: list[tuple[BaseException | None, float]], most: int
) -> None:
    clock = Clock()
    circuit = Circuit("s", "a", failures=most, open_s=1.0, clock=clock)
    failures, probe_at = 0, -1.0
    for end, passed in history:
        clock.now += passed
        assert try_circuit(circuit, end) == (probe_at <= clock.now)
        if probe_at > clock.now:
            continue
        if end is AWAY:
            failures += 1
            if failures >= most or probe_at >= 0:
                probe_at = clock.now + 1.0
        elif end is not CANCELLED:
            failures, probe_at = 0, -1.0
        assert circuit.is_open == (probe_at >= 0)


@pytest.mark.usefixtures("one_search_a_request")
async def test_searches_that_wait_for_a_connection_of_this_process_do_not_fail(
    server: FailingServer, loop_clock: LoopClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers each within a moment; a queue here says nothing about it, however long it takes."""
    monkeypatch.setattr("forage_runtime.clients.retriever.MAX_CONNECTIONS", 2)
    before = [read_total(counter) for counter in (OPENED, calls.GIVEN_UP, calls.RETRIED)]
    server.hold()
    async with open_client(server) as retriever:
        searches = [asyncio.create_task(retriever.search([str(number)])) for number in range(16)]
        for round_ in range(1, 9):
            await wait_until_async(lambda due=2 * round_: len(server.requests) == due)
            assert QUEUED.labels("retriever")._value.get() == 16 - 2 * round_
            waits = {wait["what"]: (wait["count"], wait["why_unlimited"]) for wait in list_waits()}
            assert waits["answers"] == (2, "")
            if round_ < 8:
                assert waits["a free connection"] == (16 - 2 * round_, "calls before it end within their limits")
            loop_clock.skip(0.9 * LONG_S)
            server.release(2)
        await asyncio.gather(*searches)
    assert all(request["timeout_s"] > LONG_S / 2 for request in server.requests)
    assert [read_total(counter) for counter in (OPENED, calls.GIVEN_UP, calls.RETRIED)] == before


def test_a_circuit_allows_one_probe_at_a_time() -> None:
    clock = Clock()
    circuit = Circuit("s", "a", failures=1, open_s=1.0, clock=clock)
    try_circuit(circuit, AWAY)
    clock.now = 2.0
    with circuit.attempt():
        assert not try_circuit(circuit, None)
    assert try_circuit(circuit, None)


def test_a_failure_of_a_call_begun_earlier_does_not_keep_the_circuit_open_longer() -> None:
    clock = Clock()
    circuit = Circuit("s", "a", failures=1, open_s=1.0, clock=clock)
    early = circuit.attempt()
    early.__enter__()
    try_circuit(circuit, AWAY)
    clock.now = 0.9
    assert not early.__exit__(type(AWAY), AWAY, None)
    clock.now = 1.0
    assert try_circuit(circuit, None)


def read_total(counter: Any) -> float:
    return sum(s.value for metric in counter.collect() for s in metric.samples if s.name.endswith("_total"))
