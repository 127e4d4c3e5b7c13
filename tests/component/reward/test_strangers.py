"""Callers without a token, at a real reward service: they take no room from callers with one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Issuer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import REGISTRY
from waiting import wait_until_async

from forage_proto.v1 import reward_pb2, reward_pb2_grpc
from forage_reward.serve import server
from forage_reward.serve.server import Server
from forage_runtime.security import byte_budget, call_limits
from forage_runtime.settings import RewardSettings, Settings, TlsSettings

TOKEN = (("authorization", "Bearer the-secret-of-today"),)
CHECK = "/grpc.health.v1.Health/Check"
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@pytest.fixture
def serve(free_address: Callable[[], str], tmp_path: Path) -> Iterator[Callable[..., str]]:
    servers: list[Server] = []

    def start(**tls: Any) -> str:
        tokens = tmp_path / "tokens"
        tokens.write_text("the-secret-of-today\n")
        reward = RewardSettings(grpc_address=free_address(), auth_token_file=tokens)
        servers.append(Server(Settings(reward=reward, tls=TlsSettings(**tls))).listen())
        return reward.grpc_address

    yield start
    for one in servers:
        one.drain(0)


@asynccontextmanager
async def connect(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


async def describe(channel: grpc.aio.Channel) -> reward_pb2.DescribeResponse:
    return await reward_pb2_grpc.RewardStub(channel).Describe(reward_pb2.DescribeRequest(), metadata=TOKEN, timeout=300)


def read_shed() -> float:
    return REGISTRY.get_sample_value("forage_common_requests_shed_total", {"wire": "reward/grpc"}) or 0.0


async def test_watchers_are_bounded_and_take_no_room_from_callers(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONCURRENT_CALLS", 2)
    request = health_pb2.HealthCheckRequest()
    async with connect(address := serve()) as strangers, connect(address) as callers:
        health = health_pb2_grpc.HealthStub(strangers)
        watches = [health.Watch(request, timeout=300) for _ in range(call_limits.MAX_WATCHERS)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        before = read_shed()
        further = health.Watch(request, timeout=300)
        with pytest.raises(grpc.RpcError, match="32 watchers of its health, as many as this service takes") as refused:
            await further.read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert read_shed() == before + 1
        assert (await describe(callers)).rewards
        assert (await health.Check(request, timeout=300)).status == health_pb2.HealthCheckResponse.SERVING
        watches[0].cancel()
        while True:  # its place is free once the service has seen it go
            watch = health.Watch(request, timeout=300)
            try:
                assert await watch.read() is not grpc.aio.EOF
                break
            except grpc.RpcError:
                await asyncio.sleep(0.05)


async def test_checks_that_never_arrive_end_soon_and_take_no_room_from_callers(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONCURRENT_CALLS", 2)
    monkeypatch.setattr(byte_budget, "CHECK_S", 300.0)
    done = asyncio.Event()

    async def send_late() -> AsyncIterator[bytes]:
        await done.wait()
        yield b""

    async with connect(address := serve()) as strangers, connect(address) as callers:
        check = strangers.stream_unary(CHECK)
        stalled = [check(send_late(), timeout=300) for _ in range(call_limits.MAX_CHECKS + 10)]
        await wait_until_async(lambda: sum(one.done() for one in stalled) == 10)
        for _ in range(5):
            assert (await describe(callers)).rewards
        done.set()
        ends = [await one.code() for one in stalled]
        assert ends.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 10
        assert ends.count(grpc.StatusCode.OK) == call_limits.MAX_CHECKS
        done.clear()
        monkeypatch.setattr(byte_budget, "CHECK_S", 0.3)
        assert await check(send_late(), timeout=300).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        reply = await health_pb2_grpc.HealthStub(callers).Check(health_pb2.HealthCheckRequest(), timeout=300)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        done.set()


async def test_callers_beyond_the_limit_are_refused_and_the_refused_do_not_count(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONCURRENT_CALLS", 2)
    async with connect(serve()) as channel:
        score = channel.stream_stream("/forage.v1.Reward/ScoreStream")
        open_ = [score(metadata=TOKEN, timeout=300) for _ in range(2)]
        for call in open_:
            await call.write(b"")
            await call.read()  # it has been admitted
        for _ in range(5):
            with pytest.raises(grpc.RpcError, match="2 calls, as many as this service takes, are in progress"):
                await describe(channel)
            stranger = channel.unary_unary("/forage.v1.Reward/Describe")
            assert await stranger(b"", timeout=300).code() is grpc.StatusCode.UNAUTHENTICATED
        for call in open_:
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
        assert (await describe(channel)).rewards


@pytest.mark.parametrize(("sent", "tls"), [(b"", False), (b"", True), (HTTP2_HELLO[:20], False), (HTTP2_HELLO, False)])
async def test_connections_that_say_nothing_are_closed(
    serve: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes, tls: bool
) -> None:
    monkeypatch.setattr(call_limits, "HANDSHAKE_MS", 300)
    monkeypatch.setattr(call_limits, "IDLE_MS", 300)
    issuer = Issuer(tmp_path / "authority")
    address = serve(**issuer.make_settings(issuer.issue("reward"))) if tls else serve()
    host, _, port = address.rpartition(":")
    began = time.monotonic()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    while await reader.read(2**16):
        pass
    assert time.monotonic() - began > 0.25
    writer.close()


async def test_a_caller_whose_connection_was_closed_for_idleness_connects_again(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_limits, "IDLE_MS", 1000)
    async with connect(serve()) as channel:
        await describe(channel)
        while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(state)
        assert (await describe(channel)).rewards


async def test_a_caller_that_is_gone_without_a_word_keeps_no_call(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_limits, "PING_MS", 200)
    monkeypatch.setattr(call_limits, "PING_REPLY_MS", 3000)
    host, _, port = serve().rpartition(":")
    gone, closed = asyncio.Event(), asyncio.Event()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, end: asyncio.Event | None) -> None:
        while content := await reader.read(2**16):
            if not gone.is_set():
                writer.write(content)
        if end is not None:
            end.set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(host, int(port))
        await asyncio.gather(carry(reader, ours, None), carry(theirs, writer, closed))

    middle = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with middle, connect("{}:{}".format(*middle.sockets[0].getsockname())) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=300)
        await watch.read()
        await asyncio.sleep(0.7)  # it answers the service's questions
        assert not closed.is_set()
        gone.set()
        await closed.wait()
        watch.cancel()
