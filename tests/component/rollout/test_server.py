"""`forage.v1.Rollout` over a real channel, the agent behind it real, the engine scripted."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Issuer
from otlp_receiver import Receiver
from rollout_backend import LINES, AgentBackend, LineEngine
from service_ports import check_grpc_port
from waiting import WAIT_S
from waiting import wait_until_async as wait_until

from forage_proto.v1.rollout_pb2 import (
    GetStatusRequest,
    PauseRequest,
    ResumeRequest,
    RunRequest,
    RunStreamRequest,
    UpdateWeightsRequest,
)
from forage_proto.v1.rollout_pb2_grpc import RolloutStub
from forage_proto.v1.trajectory_pb2 import ActionKind, ChatMessage, Policy, Prompt, Purpose, Sampling, Status
from forage_rollout.metrics import Snapshot
from forage_rollout.serve.backend import ServiceState
from forage_rollout.serve.grpc_api import RolloutApi, make_server
from forage_rollout.serve.server import report_health
from forage_runtime.clients.rollout import RolloutClient
from forage_runtime.errors import SettingsError, UnavailableError
from forage_runtime.security.token_file import TokenFile, authorization_metadata
from forage_runtime.settings import EngineSettings, RolloutSettings, Settings, TlsSettings
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.health import Health
from forage_weights.rollout.policy import find_oldest

SIZES = {"max_start_length": 500, "max_prompt_length": 5000, "max_obs_length": 500, "max_response_length": 500}


@pytest.fixture
def settings() -> Settings:
    return Settings(rollout=RolloutSettings(**SIZES, engine=EngineSettings(max_model_len=9999)))


@pytest.fixture
def engine(char_codec: Any) -> LineEngine:
    engine = LineEngine(char_codec())
    engine.gate.set()
    return engine


@pytest.fixture
def backend(settings: Settings, engine: LineEngine) -> AgentBackend:
    return AgentBackend(settings, engine)


@pytest.fixture
async def state(backend: AgentBackend) -> ServiceState:
    state = ServiceState(Health())
    state.health.mark_started()
    state.running = True
    await state.refresh(backend)
    return state


@pytest.fixture
async def stub(
    backend: AgentBackend, state: ServiceState, free_address: Callable[[], str]
) -> AsyncIterator[RolloutStub]:
    address = free_address()
    server, _ = make_server(address, RolloutApi(backend, state, vocabulary=0x110000), None, TlsSettings())
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield RolloutStub(channel)
    await server.stop(None)


def build_prompt(**fields: Any) -> Prompt:
    known: dict[str, Any] = {"messages": [ChatMessage(role="user", content="Who?")], "samples": 2}
    return Prompt(**{**known, "purpose": Purpose.PURPOSE_VALIDATION, **fields})


async def test_a_prompt_is_run_and_scored(stub: RolloutStub) -> None:
    group = (await stub.Run(RunRequest(prompt=build_prompt()))).group
    assert [t.status for t in group.trajectories] == [Status.STATUS_OK] * 2
    assert [t.score.total for t in group.trajectories] == [1.0] * 2
    assert group.group_uid.startswith("call/")  # nameless prompts do not share a name


async def test_health_checks_and_reflection_are_served(
    backend: AgentBackend, state: ServiceState, free_address: Callable[[], str]
) -> None:
    address = free_address()
    server, probes = make_server(address, RolloutApi(backend, state), None, TlsSettings())
    await server.start()
    reporting = asyncio.create_task(report_health(state.health, probes))
    state.health.wait_for("policy", "none is served yet")

    async def wait_for(status: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while await asyncio.to_thread(check_grpc_port, address, "forage.v1.Rollout") != status:
                await asyncio.sleep(0.05)

    await wait_for("NOT_SERVING")
    state.health.mark_ready("policy")
    await wait_for("SERVING")
    await probes.begin_shutdown()
    await wait_for("NOT_SERVING")
    reporting.cancel()
    await server.stop(None)


async def test_a_prompt_may_be_token_ids(stub: RolloutStub, engine: LineEngine) -> None:
    group = (
        await stub.Run(RunRequest(prompt=build_prompt(messages=[], token_ids=[87, 104, 111, 63], samples=1)))
    ).group
    assert engine.asked[0].token_ids == [87, 104, 111, 63]
    assert list(group.trajectories[0].token_ids[:4]) == [87, 104, 111, 63]


async def test_turns_are_streamed_at_once_and_the_group_last(stub: RolloutStub, engine: LineEngine) -> None:
    engine.gate.clear()
    call = stub.RunStream(RunStreamRequest(prompt=build_prompt(samples=1)))
    acted, observed = await call.read(), await call.read()
    assert (acted.acted.action, acted.text) == (ActionKind.ACTION_KIND_SEARCH, LINES[0])
    assert [d.id for d in observed.observed.documents] == ["d1"]
    assert 'Doc 1(Title: "T") body' in observed.text
    engine.gate.set()  # only now can the second turn end
    answered, done = await call.read(), await call.read()
    assert answered.acted.content == "me"
    assert done.group.trajectories[0].finished
    assert await call.read() is grpc.aio.EOF


async def test_a_caller_that_disconnects_ends_its_trajectories(stub: RolloutStub, engine: LineEngine) -> None:
    engine.gate.clear()
    call = stub.RunStream(RunStreamRequest(prompt=build_prompt(samples=3)))
    for _ in range(6):
        await call.read()
    call.cancel()
    await wait_until(lambda: engine.cancelled == 3)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"messages": []}, r"prompt.messages is \[\]: expected at least one"),
        ({"messages": [ChatMessage(content="x")]}, r"prompt.messages\[0\].role is ''"),
        ({"samples": 0}, "prompt.samples is 0: expected 1 to 1024"),
        ({"samples": 1025}, "prompt.samples is 1025"),
        ({"sampling": Sampling(temperature=-1)}, "prompt.sampling.temperature is -1.0: expected 0"),
        ({"sampling": Sampling(temperature=float("nan"))}, "prompt.sampling.temperature is nan"),
        ({"environment": "x"}, "prompt.environment is 'x': expected one of search, single_turn, external"),
        ({"sampling": Sampling(top_p=1.5)}, "prompt.sampling.top_p is 1.5: expected more than 0, at most 1"),
        ({"sampling": Sampling(top_k=-2)}, "prompt.sampling.top_k is -2: expected 1 or more"),
        ({"timeout_s": -1.0}, "prompt.timeout_s is -1.0: expected seconds"),
        ({"token_ids": [0x110000]}, "prompt.token_ids is 1114112: expected ids below 1114112"),
    ],
)
async def test_a_bad_prompt_is_refused_by_field(stub: RolloutStub, fields: dict[str, Any], sentence: str) -> None:
    for call in (
        lambda: stub.Run(RunRequest(prompt=build_prompt(**fields))),
        lambda: stub.RunStream(RunStreamRequest(prompt=build_prompt(**fields))).read(),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=sentence) as refused:
            await call()
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_before_the_start_calls_fail_with_what_is_missing(stub: RolloutStub, state: ServiceState) -> None:
    state.running = False
    state.health.wait_for("engine", "vLLM is starting")
    for call in (lambda: stub.Run(RunRequest(prompt=build_prompt())), lambda: stub.Pause(PauseRequest())):
        with pytest.raises(grpc.aio.AioRpcError, match="engine: vLLM is starting") as refused:
            await call()
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_dead_engine_is_unavailable(stub: RolloutStub, backend: AgentBackend) -> None:
    backend.dead = True
    for call in (
        lambda: stub.Run(RunRequest(prompt=build_prompt())),
        lambda: drain(stub.RunStream(RunStreamRequest(prompt=build_prompt()))),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="try again") as failed:
            await call()
        assert failed.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_engines_pause_and_resume_and_the_status_shows_it(stub: RolloutStub, backend: AgentBackend) -> None:
    status = await stub.GetStatus(GetStatusRequest())
    assert (status.engines, status.paused, status.tokens_generated) == (2, False, 7)
    assert status.serving == Policy(version=3, epoch=2)  # the oldest of both
    assert (await stub.Pause(PauseRequest(drain=True))).engines == 2
    assert backend.drained
    assert (await stub.GetStatus(GetStatusRequest())).paused
    assert (await stub.Resume(ResumeRequest())).engines == 2
    assert not (await stub.GetStatus(GetStatusRequest())).paused


async def test_weights_are_updated_but_never_to_older_ones(stub: RolloutStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="not newer than what is served, version 4 of epoch 2") as refused:
        await stub.UpdateWeights(UpdateWeightsRequest(policy=Policy(version=4, epoch=2, uri="/x")))
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    with pytest.raises(grpc.aio.AioRpcError, match=r"policy\.uri is empty") as refused:
        await stub.UpdateWeights(UpdateWeightsRequest(policy=Policy(version=9, epoch=2)))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    newer = Policy(version=9, epoch=2, uri="/x")
    reply = await stub.UpdateWeights(UpdateWeightsRequest(policy=newer))
    assert (reply.serving, reply.pause_s) == (newer, 0.25)
    assert (await stub.GetStatus(GetStatusRequest())).serving == newer


async def test_with_a_token_file_calls_need_the_token_and_follow_its_rotation(
    backend: AgentBackend, state: ServiceState, free_address: Callable[[], str], tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    address = free_address()
    server, _ = make_server(address, RolloutApi(backend, state), TokenFile(file), TlsSettings())
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = RolloutStub(channel)
        calls = [
            lambda **kind: stub.Run(RunRequest(prompt=build_prompt()), **kind),
            lambda **kind: stub.GetStatus(GetStatusRequest(), **kind),
            lambda **kind: drain(stub.RunStream(RunStreamRequest(prompt=build_prompt()), **kind)),
        ]
        for call in calls:
            await call(metadata=authorization_metadata(file))
            for metadata in (None, (("authorization", "Bearer wrong"),), (("authorization", "first"),)):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call(metadata=metadata)
                assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        old = authorization_metadata(file)
        file.write_text("second\n")
        for call in calls:
            await call(metadata=authorization_metadata(file))
            with pytest.raises(grpc.aio.AioRpcError, match="asks for a token"):
                await call(metadata=old)
    await server.stop(None)


async def test_the_health_endpoint_has_the_notes_of_the_dispatcher(backend: AgentBackend, state: ServiceState) -> None:
    backend.dispatchers = [Snapshot("d", {}, notes={"backpressure": "8 groups wait for the trainer"})]
    await state.refresh(backend)
    assert state.health.notes == {"backpressure": "8 groups wait for the trainer"}
    assert state.health.waiting == {}
    backend.dispatchers = [Snapshot("d", {})]
    await state.refresh(backend)
    assert state.health.notes == {}


def test_the_oldest_policy_is_none_while_an_engine_has_none() -> None:
    one, two = Policy(version=9, epoch=1), Policy(version=1, epoch=2)
    assert find_oldest([two, one], None) == one
    assert find_oldest([one, None], two) is None
    assert find_oldest([], two) is None


def test_an_engine_of_another_epoch_than_the_announced_one_is_the_oldest_also_when_its_epoch_is_higher() -> None:
    before, now, newer = (
        Policy(version=20, epoch=3),
        Policy(version=18, epoch=1),
        Policy(version=19, epoch=1),
    )
    assert find_oldest([now, before, newer], newer) == before
    assert find_oldest([now, newer], newer) == now
    assert find_oldest([now, before], before) == now


async def drain(call: Any) -> list[Any]:
    return [event async for event in call]


async def test_calls_belong_to_the_trace_of_their_metadata_or_begin_one(stub: RolloutStub, receiver: Receiver) -> None:
    with tracing.span("mine", parent="") as mine:
        group = (await stub.Run(RunRequest(prompt=build_prompt()), metadata=tracing.trace_metadata())).group
    call = stub.RunStream(RunStreamRequest(prompt=build_prompt(samples=1)))
    last = [event async for event in call][-1]
    # The server's side of a stream ends after the client's.
    await asyncio.to_thread(receiver.wait_for, lambda r: r.named("forage.v1.Rollout/RunStream") and r.named("mine"))
    (outer,) = receiver.named("mine")
    (served,) = receiver.named("forage.v1.Rollout/Run")
    assert (served.trace_id, served.parent_id, served.kind) == (
        tracing.traceparent(mine)[3:35],
        outer.span_id,
        "server",
    )
    assert {trajectory.trace_id for trajectory in group.trajectories} == {tracing.traceparent(mine)[3:35]}
    (run,) = receiver.named("rollout.run", tracing.traceparent(mine)[3:35])
    assert run.parent_id == served.span_id
    (begun,) = receiver.named("forage.v1.Rollout/RunStream")
    assert begun.parent_id == ""
    assert last.group.trajectories[0].trace_id == begun.trace_id != tracing.traceparent(mine)[3:35]
    assert not [span for span in receiver.spans if span.failed]


async def test_who_controls_the_engines_is_recorded(
    backend: AgentBackend, state: ServiceState, free_address: Callable[[], str], tmp_path: Path
) -> None:
    token, audit, address = tmp_path / "token", tmp_path / "audit.jsonl", free_address()
    token.write_text("secret\n")
    servicer = RolloutApi(backend, state, 0, audit, has_token=True)
    server, _ = make_server(address, servicer, TokenFile(token), TlsSettings())
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stub, metadata = RolloutStub(channel), (("authorization", "Bearer secret"),)
        await stub.Pause(PauseRequest(drain=True), metadata=metadata)
        await stub.Resume(ResumeRequest(), metadata=metadata)
        for version in (1, 9):
            policy = Policy(version=version, epoch=2, uri="/x")
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.UpdateWeights(UpdateWeightsRequest(policy=policy), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Pause(PauseRequest())
    await server.stop(0)
    assert "secret" not in audit.read_text()
    acts = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [act["act"] for act in acts] == ["pause_engines", "resume_engines", "refuse_policy", "update_weights"]
    assert {act["actor"] for act in acts} == {f"token {hashlib.sha256(b'secret').hexdigest()[:12]}"}
    assert all(act["peer"].startswith("ipv4:127.0.0.1:") for act in acts)
    assert (acts[0]["engines"], acts[0]["drain"]) == (2, True)
    assert "not newer than what is served" in acts[2]["reason"]
    assert (acts[3]["version"], acts[3]["epoch"], acts[3]["uri"]) == (9, 2, "/x")


async def test_a_service_with_certificates_speaks_tls_alone(
    backend: AgentBackend, state: ServiceState, free_address: Callable[[], str], tmp_path: Path
) -> None:
    issuer, address = Issuer(tmp_path), free_address()
    (tmp_path / "token").write_text("a-secret")
    tls = TlsSettings(**issuer.make_settings(issuer.issue("rollout"), require_client_cert=True))
    own = RolloutSettings(grpc_address=address, auth_token_file=tmp_path / "token", trajectory_timeout_s=1)
    server, _ = make_server(address, RolloutApi(backend, state), TokenFile(tmp_path / "token"), tls)
    await server.start()
    async with RolloutClient(Settings(rollout=own, tls=tls)) as rollout:
        group = await rollout.run(build_prompt())
        events = [event async for event in rollout.stream(build_prompt())]
    assert group.trajectories
    assert events[-1].group.trajectories
    async with RolloutClient(Settings(rollout=own)) as rollout:
        with pytest.raises(UnavailableError, match=r"it may speak TLS \(set tls\.ca here\)"):
            await drain(rollout.stream(build_prompt()))
    without = own.model_copy(update={"auth_token_file": None})
    async with RolloutClient(Settings(rollout=without, tls=tls)) as rollout:
        with pytest.raises(SettingsError, match=r"asks for a token.*set rollout\.auth_token_file"):
            await rollout.status()
    await server.stop(None)
