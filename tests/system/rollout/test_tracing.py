"""Spans of real services: one trace through the streams, the agent, the retriever's and the reward's processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from char_codec import CharCodec
from otlp_receiver import Received, Receiver, receive_grpc
from rollout_parts import Services, list_waiting, write_small_corpus
from scripted_engine import ScriptedEngine
from traces import PARENTS, find_spans
from waiting import WAIT_S, wait_until_async

from forage_proto.v1 import retriever_pb2, retriever_pb2_grpc
from forage_proto.v1.packed_pb2 import PackedGroup
from forage_proto.v1.trajectory_pb2 import ChatMessage, GroundTruth, Policy, Prompt, Replica, Status, TrajectoryGroup
from forage_queue.rollout.dispatcher import Dispatcher
from forage_queue.streams.client import StreamClient
from forage_rollout.agent import Agent
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.clients.reward import RewardClient
from forage_runtime.settings import RedisSettings, Settings, load_settings
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.otlp import Tracer
from forage_trajectory.codec import pack_group, unpack_group

LINES = ["<think>t</think> <search> Norland </search>", "<think>t</think> <answer> Norcity </answer>"]
LISTENING = ("retriever.http_address", "retriever.grpc_address", "reward.grpc_address", "reward.health_address")


@dataclass(frozen=True)
class Stack:
    """Services that trace, as processes, and the settings that lead to them."""

    receiver: Receiver
    settings: Settings


@pytest.fixture(scope="module")
def stack(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, free_address: Callable[[], str]
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("services")
    write_small_corpus(folder / "corpus.jsonl")
    with receive_grpc() as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        overrides = [
            "tracing.enabled=true",
            f"tracing.endpoint={receiver.endpoint}",
            f"data.corpus={folder / 'corpus.jsonl'}",
            f"retriever.cache_dir={folder / 'cache'}",
            "retriever.mode=bm25",
            "reward.workers=2",
            *(f"{name}={free_address()}" for name in LISTENING),
        ]
        settings = load_settings(overrides=overrides, environ={})
        services = Services(repository, folder)
        try:
            for name in ("retriever", "reward"):
                services.start(name, *overrides)
            asyncio.run(_wait_until_ready(settings))
            yield Stack(receiver, settings)
        finally:
            services.end()


@pytest.fixture
def traced(stack: Stack) -> Iterator[Stack]:
    """This process traces, too, as the rollout service."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        tracing.start(stack.settings, "rollout")
    stack.receiver.spans.clear()
    yield stack
    tracing.stop()


async def _wait_until_ready(settings: Settings) -> None:
    for address in (settings.retriever.http_address, settings.reward.health_address):
        await wait_until_async(lambda address=address: list_waiting(address) == set())


def make_agent(settings: Settings) -> Agent:
    codec = CharCodec()
    retriever = RetrieverClient(settings.retriever.http_address, settings.rollout.retrieve_timeout_s)
    engine = ScriptedEngine(codec, LINES)
    return Agent(settings, engine, retriever, RewardClient(settings), codec, "<eos>", "replica-1")


def make_prompt(name: str) -> Prompt:
    return Prompt(
        run_id="local",
        group_uid=f"world_facts/train/{name}/0",
        data_source="world_facts",
        messages=[ChatMessage(role="user", content="What is the capital of Norland?")],
        ground_truth=GroundTruth(targets=["Norcity"]),
        samples=2,
        batch=1,
    )


@asynccontextmanager
async def run_dispatcher(settings: Settings, streams: StreamClient) -> AsyncIterator[None]:
    async def ask_engines() -> dict[str, Replica]:
        return {"engine": Replica(serving=Policy(version=1, epoch=1))}

    async def check_ready() -> None:
        pass

    async def run_packed(asked: Prompt) -> PackedGroup:
        return pack_group(await running.run_group(asked))

    running = make_agent(settings)
    task = asyncio.create_task(Dispatcher(settings, streams, "one", run_packed, ask_engines, check_ready).run())
    yield
    task.cancel()
    await asyncio.wait([task])
    await running.close()


async def run_group(settings: Settings, redis: RedisSettings, asked: Prompt) -> TrajectoryGroup:
    """Run a prompt through the streams and a dispatcher. Returns its group."""
    settings = settings.model_copy(update={"redis": redis})
    streams = StreamClient(redis, "local", 60.0)
    streams.create_groups()
    streams.publish(Policy(version=1, epoch=1))
    streams.issue(asked)
    async with run_dispatcher(settings, streams), asyncio.timeout(WAIT_S):
        while not (claimed := await asyncio.to_thread(streams.claim_groups, streams.trajectories, 1, 0.2)):
            pass
    return unpack_group(claimed[0].message.read_packed())


async def wait_for_spans(stack: Stack, condition: Callable[[Receiver], Any]) -> Any:
    """Wait until the receiver meets the condition, without blocking this process. Returns its value."""
    return await asyncio.to_thread(stack.receiver.wait_for, condition)


async def test_a_trace_spans_the_streams_and_every_service(traced: Stack, redis_server: RedisSettings) -> None:
    trainer = Tracer(traced.settings.tracing, "trainer", "local")
    asked = make_prompt("1")
    with trainer.span("trainer.issue", parent="") as root:
        tracing.attach_trace_context(asked, root)
    group = await run_group(traced.settings, redis_server, asked)
    with trainer.span("trainer.claim", parent=group.traceparent):
        pass
    with trainer.span("trainer.train", parent=group.traceparent):
        pass
    trainer.close()
    assert {trajectory.trace_id for trajectory in group.trajectories} == {tracing.traceparent(root)[3:35]}
    await wait_for_spans(
        traced,
        lambda r: {span.name for span in r.spans if span.trace_id == tracing.traceparent(root)[3:35]} == set(PARENTS),
    )
    spans = find_spans(traced.receiver, tracing.traceparent(root)[3:35])
    assert [len(spans[name]) for name in ("rollout.sample", "rollout.generate", "POST /retrieve")] == [2, 4, 2]
    assert sorted(span.attributes["forage.turn"] for span in spans["rollout.generate"]) == [1, 1, 2, 2]
    assert spans["reward.score"][0].attributes["forage.items"] == 2
    assert not [span for same_name in spans.values() for span in same_name if span.failed]


async def test_an_unsampled_trace_is_not_exported_and_keeps_its_id(traced: Stack, redis_server: RedisSettings) -> None:
    asked = make_prompt("2")
    asked.trace_id, asked.traceparent = "ab" * 16, f"00-{'ab' * 16}-{'cd' * 8}-00"
    group = await run_group(traced.settings, redis_server, asked)
    assert {trajectory.status for trajectory in group.trajectories} == {Status.STATUS_OK}
    assert {trajectory.trace_id for trajectory in group.trajectories} == {"ab" * 16}
    sampled = make_agent(traced.settings)
    await sampled.run_group(make_prompt("3"))
    await sampled.close()
    spans = await wait_for_spans(
        traced, lambda r: r.named("rollout.run") and r.named("forage.v1.Reward/Score") and r.spans
    )
    assert "ab" * 16 not in {span.trace_id for span in spans}


async def test_an_unavailable_retriever_leaves_failed_spans_and_retries(
    traced: Stack, free_address: Callable[[], str]
) -> None:
    overrides = [f"retriever.http_address={free_address()}", "rollout.retrieve_timeout_s=0.5"]
    running = make_agent(load_settings(overrides=overrides, environ={}))
    group = await running.run_group(make_prompt("4"))
    await running.close()
    assert {trajectory.status for trajectory in group.trajectories} == {Status.STATUS_TIMEOUT}
    trace_id = group.trajectories[0].trace_id

    def find_searches(receiver: Receiver) -> list[Received]:
        return receiver.named("retriever.search", trace_id) if receiver.named("rollout.run", trace_id) else []

    searches = await wait_for_spans(traced, find_searches)
    assert all(span.failed and "gave no answer within 0.5 s" in span.detail for span in searches)
    assert "retry" in searches[0].events
    samples = traced.receiver.named("rollout.sample", trace_id)
    assert [(span.failed, span.attributes["forage.status"]) for span in samples] == [(True, "STATUS_TIMEOUT")] * 2


async def test_calls_by_grpc_belong_to_the_trace_of_their_metadata(traced: Stack) -> None:
    request = retriever_pb2.RetrieveRequest(queries=["Norland"])
    async with grpc.aio.insecure_channel(traced.settings.retriever.grpc_address) as channel:
        stub = retriever_pb2_grpc.RetrieverStub(channel)
        with tracing.span("mine", parent="") as mine:
            await stub.Retrieve(request, metadata=tracing.trace_metadata(), timeout=300)
            stream = stub.RetrieveStream(
                iter([retriever_pb2.RetrieveStreamRequest(id=1, request=request)]), metadata=tracing.trace_metadata()
            )
            assert [reply.id async for reply in stream] == [1]
    names = {f"forage.v1.Retriever/{method}" for method in ("Retrieve", "RetrieveStream")}
    await wait_for_spans(
        traced,
        lambda r: (
            names | {"mine"} <= {span.name for span in r.spans if span.trace_id == tracing.traceparent(mine)[3:35]}
        ),
    )
    (outer,) = traced.receiver.named("mine")
    for name in names:
        (span,) = traced.receiver.named(name, tracing.traceparent(mine)[3:35])
        assert (span.parent_id, span.kind, span.service) == (outer.span_id, "server", "forage-retriever")
