"""gRPC and HTTP of the rollout service as a process, through Ray Serve to vLLM, with a token."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from listening import LOOPBACK, list_listening
from rollout_parts import ADDRESSES, Services, build_prompt, get, list_waiting, publish, wait_until, write_small_corpus
from waiting import WAIT_S

from forage_proto.v1.rollout_pb2 import (
    GetStatusRequest,
    PauseRequest,
    ResumeRequest,
    RunRequest,
    RunStreamRequest,
    UpdateWeightsRequest,
)
from forage_proto.v1.rollout_pb2_grpc import RolloutStub
from forage_proto.v1.trajectory_pb2 import Policy, Prompt, Status
from forage_queue.streams.client import StreamClient
from forage_runtime.security.token_file import authorization_metadata
from forage_runtime.settings import RedisSettings


@pytest.fixture
def services(repository: Path, tmp_path: Path) -> Iterator[Services]:
    made = Services(repository, tmp_path)
    yield made
    made.end()


def read_metric(health: str, name: str) -> float:
    lines = get(health, "/metrics")[1].splitlines()
    return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(f"{name} ")))


def test_the_endpoints_of_a_real_service(
    services: Services,
    free_address: Callable[[], str],
    redis_server: RedisSettings,
    repository: Path,
    tmp_path: Path,
) -> None:
    model, corpus, token = repository / "models/tiny-policy", tmp_path / "corpus.jsonl", tmp_path / "token"
    write_small_corpus(corpus)
    token.write_text("secret\n")
    addresses = {f"{name}_address": free_address() for name in ADDRESSES}
    common = [f"{name}={address}" for name, address in addresses.items()]
    common += [f"redis.url={redis_server.url}", "run.id=e2e", f"run.dir={tmp_path}/runs", f"model.path={model}"]
    common += [f"data.corpus={corpus}", "retriever.mode=bm25", f"rollout.auth_token_file={token}"]
    health = addresses["rollout.health_address"]
    service = services.start("rollout", *common)
    services.start("reward", *common)
    services.start("retriever", *common, f"retriever.cache_dir={tmp_path}/cache")
    streams = StreamClient(redis_server, "e2e")
    streams.create_groups()
    first = publish(streams, model, tmp_path / "runs", 5, 1)
    wait_until(lambda: list_waiting(health) == set())

    metadata = authorization_metadata(token)
    with grpc.insecure_channel(addresses["rollout.grpc_address"]) as channel:
        stub = RolloutStub(channel)

        # Without the token there is nothing; health and metrics stay open.
        with pytest.raises(grpc.RpcError) as refused:
            stub.GetStatus(GetStatusRequest(), timeout=300)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert httpx.get(f"http://{addresses['rollout.http_address']}/v1/models").status_code == 401
        status = stub.GetStatus(GetStatusRequest(), timeout=300, metadata=metadata)
        assert (status.serving, status.engines, status.paused) == (first, 1, False)

        # Ray, Serve and vLLM have ports of their own; none is for other machines.
        listening = list_listening(service.pid)
        assert set(listening) <= LOOPBACK, listening

        # What is streamed is what the group holds; and the same seed gives the same tokens.
        events = list(stub.RunStream(RunStreamRequest(prompt=build_prompt(1, 0, 0)), timeout=300, metadata=metadata))
        group = events[-1].group
        assert [t.status for t in group.trajectories] == [Status.STATUS_OK] * 4
        acted = sum(event.WhichOneof("event") == "acted" for event in events)
        assert acted == sum(len(t.turns) for t in group.trajectories)
        observed = [event for event in events if event.WhichOneof("event") == "observed"]
        assert any(event.observed.documents and "<information>" in event.text for event in observed)
        again = stub.Run(
            RunRequest(prompt=render_prompt(build_prompt(1, 0, 0), group)), timeout=300, metadata=metadata
        ).group
        assert [list(t.token_ids) for t in again.trajectories] == [list(t.token_ids) for t in group.trajectories]

        # A bad prompt is refused by field.
        with pytest.raises(grpc.RpcError, match=r"prompt\.samples is 0: expected 1 to 1024") as refused:
            stub.Run(RunRequest(prompt=build_prompt(1, 0, 0, samples=0)), timeout=300, metadata=metadata)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT

        # While engines stand still a prompt waits; it is not lost.
        assert stub.Pause(PauseRequest(), timeout=300, metadata=metadata).engines == 1
        assert stub.GetStatus(GetStatusRequest(), timeout=300, metadata=metadata).paused
        answers: list[Any] = []
        waiting = threading.Thread(
            target=lambda: answers.append(
                stub.Run(RunRequest(prompt=build_prompt(2, 0, 0)), timeout=300, metadata=metadata)
            )
        )
        waiting.start()
        time.sleep(0.5)
        assert not answers
        assert stub.Resume(ResumeRequest(), timeout=300, metadata=metadata).engines == 1
        waiting.join(WAIT_S)
        assert len(answers[0].group.trajectories) == 4

        # A caller that goes away ends its trajectories.
        call = stub.RunStream(
            RunStreamRequest(prompt=build_prompt(3, 0, 0, samples=256)), timeout=300, metadata=metadata
        )
        next(call)
        call.cancel()
        wait_until(lambda: read_metric(health, "forage_rollout_samples_in_flight") == 0)

        # Weights without a trainer: never older ones, never altered ones.
        with pytest.raises(grpc.RpcError, match="not newer than what is served, version 5 of epoch 1") as refused:
            stub.UpdateWeights(UpdateWeightsRequest(policy=first), timeout=300, metadata=metadata)
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        newer = copy_policy(model, tmp_path / "runs/e2e/newer", version=6)
        altered = Policy(version=6, epoch=1, uri=newer.uri, digest="0" * 64)
        with pytest.raises(grpc.RpcError, match="digest") as refused:
            stub.UpdateWeights(UpdateWeightsRequest(policy=altered), timeout=300, metadata=metadata)
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        reply = stub.UpdateWeights(UpdateWeightsRequest(policy=newer), timeout=300, metadata=metadata)
        assert reply.serving == newer
        assert reply.pause_s > 0
        group = stub.Run(RunRequest(prompt=build_prompt(4, 0, 0)), timeout=300, metadata=metadata).group
        assert {s.version for t in group.trajectories for s in t.segments} == {6}

        # An agent outside the service: a worker takes its session, and OpenAI's client talks to the policy.
        base = f"http://{addresses['rollout.http_address']}/v1"
        headers = dict(metadata)
        asked = RunRequest(prompt=build_prompt(5, 0, 0, samples=1, environment="external"))
        sampling = stub.Run.future(asked, timeout=300, metadata=metadata)
        taken = httpx.post(f"{base}/sessions/next", json={"wait_s": 60}, headers=headers, timeout=300).json()
        session = base.removesuffix("/v1") + taken["base_url"]
        agent = openai.OpenAI(base_url=session, api_key=taken["key"], timeout=300)
        chat = list(taken["task"]["messages"])
        for follow_up in ("Go on.", ""):
            reply = agent.chat.completions.create(model="any", messages=chat, max_tokens=9).choices[0].message.content
            chat += [{"role": "assistant", "content": reply}, {"role": "user", "content": follow_up}]
        key = {"authorization": f"Bearer {taken['key']}"}
        assert httpx.post(f"{session}/end", json={"reward": 0.5}, headers=headers, timeout=300).status_code == 401
        assert httpx.post(f"{session}/end", json={"reward": 0.5}, headers=key, timeout=300).status_code == 200
        (trajectory,) = sampling.result().group.trajectories
        assert (trajectory.status, trajectory.score.total, len(trajectory.turns)) == (Status.STATUS_OK, 0.5, 2)
        assert not any(turn.context_begin for turn in trajectory.turns)
        assert {s.version for s in trajectory.segments} == {6}

    # Over HTTP: the loop, turn by turn; and the bare engine.
    question = {"question": "What is the capital of Norland?", "seed": 3, "temperature": 1.0}
    with httpx.stream("POST", f"{base}/ask", json=question, headers=headers, timeout=300) as response:
        lines = list(response.iter_lines())
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert (names[0], names[-1]) == ("turn", "done")
    assert [d["text"] for n, d in zip(names, data, strict=True) if n == "turn"]
    whole = httpx.post(f"{base}/ask", json={**question, "stream": False}, headers=headers, timeout=300).json()
    assert whole["answers"] == data[-1]["answers"]
    client = openai.OpenAI(base_url=base, api_key="secret", timeout=300)
    text_of: Any = {"model": model.name, "prompt": "the capital of", "max_tokens": 8, "temperature": 0}
    text = client.completions.create(**text_of).choices[0].text
    assert text
    assert "".join(part.choices[0].text for part in client.completions.create(**text_of, stream=True)) == text
    with pytest.raises(openai.NotFoundError):
        client.completions.create(**{**text_of, "model": "other"})

    assert read_metric(health, "forage_rollout_policy_updates_total") == 2
    assert read_metric(health, "forage_rollout_token_staleness_count") > 0
    service.send_signal(signal.SIGTERM)
    assert service.wait(WAIT_S) == 0


def test_a_port_in_use_or_a_token_file_without_token_ends_with_one_sentence(
    services: Services, free_address: Callable[[], str], repository: Path, tmp_path: Path
) -> None:
    addresses = {f"{name}_address": free_address() for name in ADDRESSES}
    common = [f"{name}={address}" for name, address in addresses.items()]
    common.append(f"model.path={repository}/models/tiny-policy")
    http, token = addresses["rollout.http_address"], tmp_path / "token"
    token.touch()
    for address in (http, addresses["rollout.health_address"]):
        host, _, port = address.rpartition(":")
        with socket.create_server((host, int(port))):
            assert services.start("rollout", *common).wait(WAIT_S) == 2
    assert services.start("rollout", *common, f"rollout.auth_token_file={token}").wait(WAIT_S) == 2
    said = [line for line in (tmp_path / "rollout.log").read_text().splitlines() if line.startswith("forage rollout: ")]
    assert len(said) == 3
    assert f"cannot listen on {http}" in said[0]
    assert f"cannot listen on {addresses['rollout.health_address']}" in said[1]
    assert f"rollout.auth_token_file {token} holds no single token" in said[2]


def render_prompt(asked: Prompt, group: Any) -> Prompt:
    """Replace the messages of a prompt by the token ids of its group."""
    same = Prompt()
    same.CopyFrom(asked)
    same.ClearField("messages")
    one = group.trajectories[0]
    same.token_ids.extend(one.token_ids[: one.prompt_length])
    return same


def copy_policy(model: Path, folder: Path, version: int) -> Policy:
    shutil.copytree(model, folder)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return Policy(version=version, epoch=1, uri=str(folder), digest=digest)
