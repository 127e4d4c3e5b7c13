"""The gRPC wire of a retriever: a front and its shards, with TLS and tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from certificates import Issuer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import REGISTRY
from retriever_parts import LONG_S, open_retrieval

from forage_proto.v1 import retriever_pb2, retriever_pb2_grpc, trajectory_pb2
from forage_retriever.index.load import Index
from forage_retriever.serve.grpc_api import MAX_REQUEST_BYTES, GrpcServer
from forage_retriever.serve.shard import Shard, ShardUnavailableError
from forage_retriever.serve.urgency import Urgency
from forage_retriever.serve.waiting import SearchOptions
from forage_runtime.security.channels import open_channel
from forage_runtime.security.token_file import TokenFile
from forage_runtime.settings import RetrieverSettings, Settings, TlsSettings
from forage_runtime.telemetry.health import Health

TOKEN, WRONG = "a-secret-of-shards", "a-secret-of-nobody"


@pytest.fixture
def secured(tmp_path: Path) -> Settings:
    """Settings of a shard that speaks mutual TLS and asks for a token."""
    issuer = Issuer(tmp_path)
    (tmp_path / "tokens").write_text(TOKEN)
    tls = TlsSettings(**issuer.make_settings(issuer.issue("retriever"), require_client_cert=True))
    return Settings(tls=tls, retriever=RetrieverSettings(auth_token_file=tmp_path / "tokens"))


@asynccontextmanager
async def serve(settings: Settings, loaded: Index, address: str) -> AsyncIterator[Settings]:
    own = settings.retriever.model_copy(update={"grpc_address": address})
    served = settings.model_copy(update={"retriever": own})
    async with open_retrieval(loaded, max_waiting=1000) as core:
        server = GrpcServer(served, core, Health())
        await server.start()
        yield served
        await server.stop(0)


async def probe(settings: Settings) -> retriever_pb2.RetrieveResponse:
    """Call a shard as a front does."""
    shard = Shard(settings.retriever.grpc_address, settings, lambda: None)
    try:
        await shard._call(retriever_pb2.RetrieveRequest(), LONG_S)
        return await shard.search(["Oslo"], SearchOptions("bm25", 1, ()), Urgency(timeout_s=LONG_S))
    finally:
        await shard.close()


async def test_a_front_searches_a_shard_that_asks_for_certificate_and_token(
    secured: Settings, loaded: Index, free_address: Callable[[], str]
) -> None:
    async with serve(secured, loaded, free_address()) as settings:
        assert len((await probe(settings)).results) == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda s, d: {"tls": TlsSettings()}, "it may speak TLS"),
        (lambda s, d: {"tls": TlsSettings(ca=s.tls.ca)}, "refuse this client's certificate"),
        (lambda s, d: {"tls": TlsSettings(ca=Issuer(d / "other").ca)}, "of an authority that tls.ca does not hold"),
        (lambda s, d: {"retriever": s.retriever.model_copy(update={"auth_token_file": None})}, "none was sent"),
        (
            lambda s, d: {"retriever": s.retriever.model_copy(update={"auth_token_file": d / "wrong"})},
            "it does not know the one sent",
        ),
    ],
    ids=["plain text", "no certificate", "other authority", "no token", "wrong token"],
)
async def test_a_shard_that_turns_a_front_away_is_unavailable_and_the_log_says_why(
    secured: Settings, loaded: Index, free_address: Callable[[], str], tmp_path: Path, change: Any, sentence: str
) -> None:
    (tmp_path / "wrong").write_text(WRONG)
    async with serve(secured, loaded, free_address()) as settings:
        with structlog.testing.capture_logs() as logs, pytest.raises(ShardUnavailableError, match=sentence):
            await probe(settings.model_copy(update=change(settings, tmp_path)))
    assert any(log["event"] == "shard_unavailable" and sentence in log["detail"] for log in logs)
    assert not any(secret in repr(logs) for secret in (TOKEN, WRONG))


async def test_streams_and_health_checks_of_a_shard_follow_its_token(
    secured: Settings, loaded: Index, free_address: Callable[[], str]
) -> None:
    async with serve(secured, loaded, free_address()) as settings:
        own, address = settings.retriever, settings.retriever.grpc_address
        labels = {"wire": "retriever/grpc", "reason": "no_token"}
        before = REGISTRY.get_sample_value("forage_common_refused_callers_total", labels) or 0.0
        async with open_channel(address, settings.tls) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=LONG_S)
            refused = retriever_pb2_grpc.RetrieverStub(channel).RetrieveStream()
            assert await refused.code() is grpc.StatusCode.UNAUTHENTICATED
        assert REGISTRY.get_sample_value("forage_common_refused_callers_total", labels) == before + 1
        assert own.auth_token_file is not None
        async with open_channel(address, settings.tls, tokens=TokenFile(own.auth_token_file)) as channel:
            requests = [
                retriever_pb2.RetrieveStreamRequest(id=id, request=retriever_pb2.RetrieveRequest(queries=["Oslo"]))
                for id in range(100)
            ]
            replies = [one async for one in retriever_pb2_grpc.RetrieverStub(channel).RetrieveStream(iter(requests))]
        assert sorted(one.id for one in replies) == list(range(100))
        assert {one.status for one in replies} == {trajectory_pb2.STATUS_OK}


async def test_a_request_that_is_too_large_is_not_read(loaded: Index, free_address: Callable[[], str]) -> None:
    address = free_address()
    async with serve(Settings(), loaded, address), open_channel(address, TlsSettings()) as channel:
        stub = retriever_pb2_grpc.RetrieverStub(channel)
        with pytest.raises(grpc.RpcError, match="larger than max") as refused:
            await stub.Retrieve(retriever_pb2.RetrieveRequest(queries=["x" * MAX_REQUEST_BYTES]))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len((await stub.Retrieve(retriever_pb2.RetrieveRequest(queries=["Oslo"]))).results) == 1
