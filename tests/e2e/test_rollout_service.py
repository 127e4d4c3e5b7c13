"""The rollout service as a process, with real Redis, retriever, reward, Ray Serve and vLLM around it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from forage_common.settings import RedisSettings
from forage_common.streams import StreamClient
from forage_common.v1.rollout_pb2 import GetStatusRequest, RunRequest
from forage_common.v1.rollout_pb2_grpc import RolloutStub
from forage_common.v1.trajectory_pb2 import ActionKind, ChatMessage, GroundTruth, Policy, Prompt, Sampling, Status
from forage_common.world.write import prompt_text

START_S = 240.0
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(repository: Path, tmp_path: Path) -> Iterator[Start]:
    """`start("reward", "key=value")`: a service from its own environment, its log in a file; killed at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def service(name: str, *overrides: str) -> subprocess.Popen[bytes]:
        python = repository / f".venvs/{name}/bin/python"
        command = [str(python if python.exists() else sys.executable), "-m", f"forage_{name}", *overrides]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("FORAGE__")} | {"OMP_NUM_THREADS": "1"}
        with (tmp_path / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=log, stdout=log)
        started.append(process)
        return process

    yield service
    for process in started:
        if process.poll() is None:
            for member in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                member.kill()
        process.wait()


@pytest.fixture
def addresses(free_address: Callable[[], str]) -> dict[str, str]:
    names = ["retriever.http", "retriever.grpc", "reward.grpc", "reward.health", "rollout.grpc", "rollout.health"]
    return {f"{name}_address": free_address() for name in names}


def get(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def waits_for(address: str) -> set[str] | None:
    """What /readyz names; None before the process listens."""
    status, text = get(address, "/readyz")
    return set(json.loads(text)["waiting_for"]) if status else None


def until(true: Callable[[], Any], timeout_s: float = START_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.1)


def publish(streams: StreamClient, model: Path, runs: Path, version: int, epoch: int) -> Policy:
    folder = runs / f"policies/v{version}-e{epoch}"
    shutil.copytree(model, folder)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    policy = Policy(version=version, epoch=epoch, uri=str(folder), digest=digest)
    streams.publish(policy)
    return policy


def prompt(position: int, batch: int, version: int, **fields: Any) -> Prompt:
    question = prompt_text("What is the capital of Norland?")
    known: dict[str, Any] = {
        "run_id": "e2e",
        "group_uid": f"world/train/{position}/0",
        "data_source": "world_facts",
        "messages": [ChatMessage(role="user", content=question)],
        "ground_truth": GroundTruth(targets=["Norcity"]),
        "samples": 4,
        "sampling": Sampling(temperature=1.0, seed=1 + 10 * position),
        "batch": batch,
        "position": position,
        "min_policy_version": version,
    }
    return Prompt(**{**known, **fields})


def take(streams: StreamClient, count: int, timeout_s: float = START_S) -> list[Any]:
    groups: list[Any] = []
    deadline = time.monotonic() + timeout_s
    while len(groups) < count and time.monotonic() < deadline:
        entries = streams.take_groups(streams.trajectories, "trainer", count, 0.5)
        groups += [entry.message for entry in entries]
        streams.discard(streams.trajectories, [entry.id for entry in entries])
    return groups


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_prompts_are_answered_under_the_published_policy_and_survive_a_kill(
    start: Start, addresses: dict[str, str], redis_server: RedisSettings, repository: Path, tmp_path: Path
) -> None:
    model = repository / "models/tiny-policy"
    corpus = tmp_path / "corpus.jsonl"
    rows = [{"id": f"d{i}", "contents": f'"Land {i}"\nThe capital of Land {i} is City {i}.'} for i in range(20)]
    rows.append({"id": "north", "contents": '"Norland"\nThe capital of Norland is Norcity.'})
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = [f"{name}={address}" for name, address in addresses.items()]
    common += [f"redis.url={redis_server.url}", "redis.reclaim_idle_s=3", "run.id=e2e", f"run.dir={tmp_path}/runs"]
    common += [f"model.path={model}", f"data.corpus={corpus}", "retriever.mode=bm25", "rollout.max_groups_in_flight=4"]
    health = addresses["rollout.health_address"]

    # It says what it waits for: first for everything, in the end for the policy alone.
    service = start("rollout", *common)
    until(lambda: waits_for(health) is not None)
    assert {"retriever", "reward", "engine", "policy"} <= (waits_for(health) or set())
    start("reward", *common)
    start("retriever", *common, f"retriever.cache_dir={tmp_path}/cache")
    until(lambda: waits_for(health) == {"policy"})

    # Prompts wait for the policy; then they come back complete.
    streams = StreamClient(redis_server, "e2e")
    streams.create()
    streams.issue(prompt(0, 1, 0))
    assert take(streams, 1, 2.0) == []
    first = publish(streams, model, tmp_path, 0, 1)
    (group,) = take(streams, 1)
    assert group.group_uid == "world/train/0/0"
    assert [t.id for t in group.trajectories] == [f"e2e/world/train/0/0/{i}" for i in range(4)]
    for trajectory in group.trajectories:
        assert trajectory.status == Status.STATUS_OK, trajectory.status_detail
        assert trajectory.score.status == Status.STATUS_OK
        assert trajectory.score.reward == "search_r1_format"
        assert {(s.version, s.epoch) for s in trajectory.segments} == {(0, 1)}
        assert len(trajectory.loss_mask) == len(trajectory.token_ids) - trajectory.prompt_length
    assert list(streams.replicas().values()) == [first]
    until(lambda: waits_for(health) == set())

    # One prompt off the streams goes through the same loop.
    with grpc.insecure_channel(addresses["rollout.grpc_address"]) as channel:
        stub = RolloutStub(channel)
        reply = stub.Run(RunRequest(prompt=prompt(99, 0, 0, samples=16)), timeout=60)
        searches = [
            turn for t in reply.group.trajectories for turn in t.turns if turn.action == ActionKind.ACTION_KIND_SEARCH
        ]
        assert any(turn.executed and turn.documents and turn.index_digest for turn in searches)
        with pytest.raises(grpc.RpcError, match="a prompt needs messages"):
            stub.Run(RunRequest(), timeout=60)
        assert stub.GetStatus(GetStatusRequest(), timeout=10).serving == first

    # A newer policy is followed.
    second = publish(streams, model, tmp_path, 1, 1)
    streams.issue(prompt(1, 2, 1))
    (group,) = take(streams, 1)
    assert {(s.version, s.epoch) for t in group.trajectories for s in t.segments} == {(1, 1)}
    assert list(streams.replicas().values()) == [second]
    until(lambda: "forage_rollout_policy_version 1.0" in get(health, "/metrics")[1], 10)
    until(lambda: "forage_rollout_groups_done_total 2.0" in get(health, "/metrics")[1], 10)

    # Killed with work in flight: nothing of it is left running, and the next life does the work, each prompt once.
    family = psutil.Process(service.pid).children(recursive=True)
    for position in range(8):
        streams.issue(prompt(position, 3, 1, samples=8))
    until(lambda: streams.backlog(streams.trajectories) > 0)
    service.kill()
    service.wait()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    service = start("rollout", *common)
    groups = take(streams, 8)
    assert sorted(group.position for group in groups) == list(range(8))
    assert take(streams, 1, 5.0) == []
    assert streams.backlog(streams.prompts) == 0

    # Told to end, it ends, and takes all its processes with it.
    family = psutil.Process(service.pid).children(recursive=True)
    service.send_signal(signal.SIGTERM)
    assert service.wait(timeout=30) == 0
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []


@pytest.mark.parametrize("port", ["rollout.grpc_address", "rollout.health_address"])
def test_a_port_in_use_ends_with_one_sentence(
    start: Start, addresses: dict[str, str], repository: Path, tmp_path: Path, port: str
) -> None:
    host, _, number = addresses[port].rpartition(":")
    with socket.create_server((host, int(number))):
        overrides = [f"{name}={address}" for name, address in addresses.items()]
        service = start("rollout", f"model.path={repository}/models/tiny-policy", *overrides)
        assert service.wait(timeout=60) == 2
    lines = (tmp_path / "rollout.log").read_text().splitlines()
    assert [line for line in lines if line.startswith("forage rollout: ")] == lines[-1:]
    assert f"cannot listen on {addresses[port]}" in lines[-1]


def test_a_model_folder_that_is_none_ends_with_one_sentence(start: Start, tmp_path: Path) -> None:
    service = start("rollout", f"model.path={tmp_path}/missing")
    assert service.wait(timeout=60) == 2
    assert (tmp_path / "rollout.log").read_text() == (
        f"forage rollout: model.path {tmp_path}/missing does not exist: "
        "set model.path to a complete Hugging Face folder\n"
    )
