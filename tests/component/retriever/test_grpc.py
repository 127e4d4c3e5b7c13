"""The gRPC server over a real BM25 index and a real channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from retriever_parts import LONG_S, Recorder, open_retrieval, record_bm25
from retriever_servers import count_queued, wait_until_queued
from waiting import wait_until_async

from forage_proto.v1 import retriever_pb2, retriever_pb2_grpc, trajectory_pb2
from forage_retriever.index.load import Index
from forage_retriever.serve import grpc_api
from forage_retriever.serve.grpc_api import GrpcServer
from forage_runtime.settings import RetrieverSettings, Settings
from forage_runtime.telemetry.health import Health

Ask = retriever_pb2.RetrieveRequest


@asynccontextmanager
async def open_stub(index: Index, address: str) -> AsyncIterator[retriever_pb2_grpc.RetrieverStub]:
    async with open_retrieval(index, max_waiting=1000) as core:
        server = GrpcServer(Settings(retriever=RetrieverSettings(grpc_address=address)), core, Health())
        await server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            yield retriever_pb2_grpc.RetrieverStub(channel)
        await server.stop(0)


@pytest.fixture
async def recorder(loaded: Index) -> tuple[Index, Recorder]:
    return record_bm25(loaded)


@pytest.fixture
async def stub(
    recorder: tuple[Index, Recorder], free_address: Callable[[], str]
) -> AsyncIterator[retriever_pb2_grpc.RetrieverStub]:
    async with open_stub(recorder[0], free_address()) as stub:
        yield stub
        recorder[1].open.set()  # a server waits for its searches, also after a test that failed


def list_ids(reply: retriever_pb2.RetrieveResponse) -> list[list[str]]:
    return [[document.id for document in result.documents] for result in reply.results]


async def test_a_reply_has_documents_and_provenance(stub: retriever_pb2_grpc.RetrieverStub, loaded: Index) -> None:
    reply = await stub.Retrieve(Ask(queries=["Oslo", "zzzz"], topk=2))
    assert list_ids(reply) == [["o", "n"], []]
    best = reply.results[0].documents[0]
    assert (best.contents, best.score > 0) == ('"Oslo"\nOslo is the capital of Norway.', True)
    source = reply.provenance
    assert (source.corpus_digest, source.index_digest, source.encoder_digest, source.mode, reply.partial) == (
        loaded.provenance.corpus,
        loaded.provenance.index,
        "",
        "bm25",
        False,
    )


async def test_a_request_may_set_filters_mode_and_rows(stub: retriever_pb2_grpc.RetrieverStub, loaded: Index) -> None:
    filters = [retriever_pb2.Filter(field="lang", values=["fr", "nn", "fr"])]
    assert sorted(list_ids(await stub.Retrieve(Ask(queries=["city Norway"], topk=9, filters=filters)))[0]) == ["7", "o"]
    reply = await stub.Retrieve(Ask(queries=["oslo"], topk=9, mode="title", rows=True))
    assert (list_ids(reply), reply.provenance.mode) == ([["o"]], "title")
    assert list(reply.results[0].rows) == [loaded.corpus.rows[1]]
    assert reply.results[0].documents[0].contents == ""


@pytest.mark.parametrize(
    ("request_", "code", "sentence"),
    [
        (Ask(queries=["x"] * 70_000), grpc.StatusCode.INVALID_ARGUMENT, "split it"),
        (Ask(queries=["x"], mode="colour"), grpc.StatusCode.INVALID_ARGUMENT, "mode 'colour' is not served here"),
        (
            Ask(queries=["x"], filters=[retriever_pb2.Filter(field="colour")]),
            grpc.StatusCode.INVALID_ARGUMENT,
            "'colour' is unknown",
        ),
        (Ask(queries=["poison"]), grpc.StatusCode.INTERNAL, "the search failed"),
    ],
)
async def test_errors_have_a_code_and_a_sentence_on_calls_and_streams(
    stub: retriever_pb2_grpc.RetrieverStub, request_: retriever_pb2.RetrieveRequest, code: object, sentence: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Retrieve(request_)
    assert (error.value.code(), sentence in error.value.details()) == (code, True)
    asked = [
        retriever_pb2.RetrieveStreamRequest(id=1, request=request_),
        retriever_pb2.RetrieveStreamRequest(id=2, request=Ask(queries=["Kandy"], topk=1)),
    ]
    replies = {reply.id: reply async for reply in stub.RetrieveStream(iter(asked))}
    assert replies[1].status not in (trajectory_pb2.STATUS_OK, trajectory_pb2.STATUS_UNSPECIFIED)
    assert sentence in replies[1].detail
    assert replies[2].status == trajectory_pb2.STATUS_OK


async def test_a_full_queue_is_resource_exhausted_but_takes_one_request_of_any_size(
    stub: retriever_pb2_grpc.RetrieverStub, recorder: tuple[Index, Recorder]
) -> None:
    recorder[1].open.clear()
    held = asyncio.ensure_future(stub.Retrieve(Ask(queries=["first"])))
    await asyncio.to_thread(recorder[1].busy.wait)
    large = asyncio.ensure_future(stub.Retrieve(Ask(queries=[str(number) for number in range(1001)])))
    await wait_until_queued(1001)
    with pytest.raises(grpc.aio.AioRpcError, match="overloaded: 1001 queries are waiting already") as error:
        await stub.Retrieve(Ask(queries=["one more"]))
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    recorder[1].open.set()
    await held
    assert len((await large).results) == 1001


async def test_the_deadline_of_a_call_is_that_of_its_search(
    stub: retriever_pb2_grpc.RetrieverStub, recorder: tuple[Index, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0.5 < grpc_api._ANSWERED_WITHIN < 1
    monkeypatch.setattr(grpc_api, "_ANSWERED_WITHIN", 0.1 / LONG_S)
    recorder[1].open.clear()
    with pytest.raises(grpc.aio.AioRpcError, match="took too long"):  # the server's words: it is the first to give up
        await stub.Retrieve(Ask(queries=["first"]), timeout=LONG_S)
    recorder[1].open.set()


async def test_every_request_of_a_stream_is_answered_once(stub: retriever_pb2_grpc.RetrieverStub) -> None:
    names = {"Oslo": "o", "Norway": "n", "Kandy": "k", "São Paulo": "s"}
    asked = [
        retriever_pb2.RetrieveStreamRequest(id=number, request=Ask(queries=[name], topk=1, mode="title"))
        for number, name in enumerate([*names] * 100)
    ]
    replies = [reply async for reply in stub.RetrieveStream(iter(asked))]
    assert {reply.id: list_ids(reply.response) for reply in replies} == {
        number: [[id]] for number, id in enumerate([*names.values()] * 100)
    }
    assert len(replies) == len(asked)


async def test_a_stream_reads_no_more_than_its_limit_in_flight(
    stub: retriever_pb2_grpc.RetrieverStub, recorder: tuple[Index, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_api, "MAX_IN_FLIGHT", 5)
    recorder[1].open.clear()
    asked = [
        retriever_pb2.RetrieveStreamRequest(id=number, request=Ask(queries=[f"query {number}"])) for number in range(40)
    ]
    call = stub.RetrieveStream(iter(asked))
    await asyncio.to_thread(recorder[1].busy.wait)
    await wait_until_async(lambda: len(recorder[1].current) + count_queued() == 5)
    recorder[1].open.set()
    assert len([reply async for reply in call]) == 40
    assert max(len(queries) for queries, _ in recorder[1].asked) <= 5


async def test_an_abandoned_stream_frees_its_resources(
    stub: retriever_pb2_grpc.RetrieverStub, recorder: tuple[Index, Recorder]
) -> None:
    recorder[1].open.clear()
    held = asyncio.ensure_future(stub.Retrieve(Ask(queries=["first"])))
    await asyncio.to_thread(recorder[1].busy.wait)
    asked = [
        retriever_pb2.RetrieveStreamRequest(id=number, request=Ask(queries=[f"query {number}"])) for number in range(9)
    ]
    call = stub.RetrieveStream(iter(asked))
    await wait_until_queued(9)
    call.cancel()
    await wait_until_queued(0)
    recorder[1].open.set()
    await held
    assert list_ids(await stub.Retrieve(Ask(queries=["Oslo"], topk=1))) == [["o"]]
    assert [queries for queries, _ in recorder[1].asked] == [["first"], ["Oslo"]]
