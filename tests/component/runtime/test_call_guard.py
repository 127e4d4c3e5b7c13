"""gRPC calls whose bytes are no message, and handlers that fail, through a real server."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc
from waiting import WAIT_S

from forage_proto.v1 import retriever_pb2, reward_pb2, reward_pb2_grpc
from forage_runtime.security.call_guard import CallGuard
from forage_runtime.telemetry.logs import configure_logs

MALFORMED = b"\xff\xff\xff\xff"
HEALTH = "/grpc.health.v1.Health/"
REWARD, RETRIEVER = "/forage.v1.Reward/", "/forage.v1.Retriever/"


class Servicer(reward_pb2_grpc.RewardServicer):
    """Fails where a name asks for it; answers all else."""

    async def Describe(self, request: reward_pb2.DescribeRequest, context: Any) -> reward_pb2.DescribeResponse:
        if request.name == "fail":
            raise KeyError("a secret of the service")
        if request.name == "refuse":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such reward")
        return reward_pb2.DescribeResponse(version="1")

    async def ScoreStream(
        self, requests: AsyncIterator[reward_pb2.ScoreStreamRequest], context: Any
    ) -> AsyncIterator[reward_pb2.ScoreStreamResponse]:
        replies: asyncio.Queue[reward_pb2.ScoreStreamResponse | None] = asyncio.Queue()

        async def read() -> None:  # as the reward service does: another task than the one that writes
            try:
                async with asyncio.TaskGroup():
                    async for request in requests:
                        replies.put_nowait(reward_pb2.ScoreStreamResponse(id=request.id))
            finally:
                replies.put_nowait(None)

        reading = asyncio.create_task(read())
        while (reply := await replies.get()) is not None:
            yield reply
        await reading


async def write_replies(requests: AsyncIterator[Any], context: Any) -> None:
    async for request in requests:
        await context.write(retriever_pb2.RetrieveStreamResponse(id=request.id))


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=(CallGuard(),))
    reward_pb2_grpc.add_RewardServicer_to_server(Servicer(), server)
    writing = grpc.stream_stream_rpc_method_handler(
        write_replies,
        retriever_pb2.RetrieveStreamRequest.FromString,
        retriever_pb2.RetrieveStreamResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("forage.v1.Retriever", {"RetrieveStream": writing}),)
    )
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def call(channel: grpc.aio.Channel, method: str, *messages: bytes) -> tuple[grpc.StatusCode, str]:
    """The status and the sentence of a call of raw messages; a stream where there are not one."""
    try:
        if method.endswith("Stream"):
            async for _ in channel.stream_stream(method)(iter(messages), timeout=WAIT_S):
                pass
        elif method.endswith("Watch"):
            async for _ in channel.unary_stream(method)(messages[0], timeout=WAIT_S):
                pass
        else:
            await channel.unary_unary(method)(messages[0], timeout=WAIT_S)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


@pytest.mark.parametrize(
    "method",
    [
        REWARD + "Describe",
        REWARD + "ScoreStream",
        RETRIEVER + "RetrieveStream",
        HEALTH + "Check",
        HEALTH + "Watch",
    ],
)
async def test_bytes_that_are_no_message_are_an_invalid_argument(
    channel: grpc.aio.Channel, method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    configure_logs("test")
    code, sentence = await call(channel, method, MALFORMED)
    assert (code, sentence) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        f"the bytes are not a message of {method}: build it from proto/forage/v1",
    )
    assert capfd.readouterr().err == ""


async def test_a_malformed_message_ends_its_stream_after_the_replies_to_those_before(
    channel: grpc.aio.Channel,
) -> None:
    good = reward_pb2.ScoreStreamRequest(id=7).SerializeToString()
    replies = channel.stream_stream(REWARD + "ScoreStream")(iter([good, MALFORMED]), timeout=WAIT_S)
    assert reward_pb2.ScoreStreamResponse.FromString(await replies.read()).id == 7
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await replies.read()
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_malformed_message_among_many_ends_its_stream_alone(channel: grpc.aio.Channel) -> None:
    good = reward_pb2.ScoreStreamRequest(id=7).SerializeToString()
    streams = [call(channel, REWARD + "ScoreStream", *[good] * 40, MALFORMED) for _ in range(50)]
    assert {code for code, _ in await asyncio.gather(*streams)} == {grpc.StatusCode.INVALID_ARGUMENT}
    assert (await call(channel, REWARD + "ScoreStream", good, good))[0] is grpc.StatusCode.OK


async def test_an_unforeseen_error_is_internal_and_its_text_stays_in_the_log(
    channel: grpc.aio.Channel, capfd: pytest.CaptureFixture[str]
) -> None:
    configure_logs("test")
    request = reward_pb2.DescribeRequest(name="fail").SerializeToString()
    assert await call(channel, REWARD + "Describe", request) == (
        grpc.StatusCode.INTERNAL,
        "the call failed; the service's log says why",
    )
    (line,) = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert (line["event"], line["method"]) == ("call_failed", REWARD + "Describe")
    assert "a secret of the service" in line["exception"]


async def test_what_a_handler_answers_or_refuses_stays(channel: grpc.aio.Channel) -> None:
    for name, code in (("", grpc.StatusCode.OK), ("refuse", grpc.StatusCode.NOT_FOUND)):
        request = reward_pb2.DescribeRequest(name=name).SerializeToString()
        assert (await call(channel, REWARD + "Describe", request))[0] is code
    assert (await call(channel, REWARD + "Nothing", b""))[0] is grpc.StatusCode.UNIMPLEMENTED
    assert (await call(channel, RETRIEVER + "RetrieveStream", b""))[0] is grpc.StatusCode.OK


def test_lines_of_libraries_are_json_too(capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, root.handlers = root.handlers, []
    try:
        configure_logs("test")
        try:
            raise ValueError("broken")
        except ValueError:
            logging.getLogger("grpc._cython").exception("two\nlines %s", "of text")
    finally:
        root.handlers = before
    (line,) = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert (line["event"], line["level"], line["logger"]) == ("two\nlines of text", "error", "grpc._cython")
    assert "ValueError: broken" in line["exception"]
