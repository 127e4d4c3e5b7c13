"""The rollout service as a process, with real Redis, retriever, reward, Ray Serve and vLLM around it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from rollout_parts import (
    ADDRESSES,
    Services,
    build_prompt,
    end,
    get,
    list_waiting,
    publish,
    take,
    wait_until,
    write_small_corpus,
)

from forage_proto.v1.rollout_pb2 import GetStatusRequest, RunRequest
from forage_proto.v1.rollout_pb2_grpc import RolloutStub
from forage_proto.v1.trajectory_pb2 import ActionKind, Status
from forage_queue.streams.client import StreamClient
from forage_runtime.settings import RedisSettings


@pytest.fixture
def services(repository: Path, tmp_path: Path) -> Iterator[Services]:
    made = Services(repository, tmp_path)
    yield made
    made.end()


@pytest.fixture
def addresses(free_address: Callable[[], str]) -> dict[str, str]:
    return {f"{name}_address": free_address() for name in ADDRESSES}


def test_prompts_are_answered_under_the_published_policy_and_survive_a_kill(
    services: Services, addresses: dict[str, str], redis_server: RedisSettings, repository: Path, tmp_path: Path
) -> None:
    model = repository / "models/tiny-policy"
    corpus = tmp_path / "corpus.jsonl"
    write_small_corpus(corpus)
    common = [f"{name}={address}" for name, address in addresses.items()]
    common += [f"redis.url={redis_server.url}", "redis.reclaim_idle_s=3", "run.id=e2e", f"run.dir={tmp_path}/runs"]
    common += [f"model.path={model}", f"data.corpus={corpus}", "retriever.mode=bm25", "rollout.max_groups_in_flight=4"]
    health = addresses["rollout.health_address"]

    # It says what it waits for: first for everything, in the end for the policy alone.
    service = services.start("rollout", *common)
    wait_until(lambda: list_waiting(health) is not None)
    assert {"retriever", "reward", "engine", "policy"} <= (list_waiting(health) or set())
    services.start("reward", *common)
    services.start("retriever", *common, f"retriever.cache_dir={tmp_path}/cache")
    wait_until(lambda: list_waiting(health) == {"policy"})

    # Prompts wait for the policy; then they come back complete.
    streams = StreamClient(redis_server, "e2e")
    streams.create_groups()
    streams.issue(build_prompt(0, 1, 0))
    assert take(streams, 1, 2.0) == []
    first = publish(streams, model, tmp_path / "runs", 0, 1)
    (group,) = take(streams, 1)
    assert group.group_uid == "world/train/0/0"
    assert [t.id for t in group.trajectories] == [f"e2e/world/train/0/0/{i}" for i in range(4)]
    for trajectory in group.trajectories:
        assert trajectory.status == Status.STATUS_OK, trajectory.status_detail
        assert trajectory.score.status == Status.STATUS_OK
        assert trajectory.score.reward == "search_r1_format"
        assert {(s.version, s.epoch) for s in trajectory.segments} == {(0, 1)}
        assert len(trajectory.loss_mask) == len(trajectory.token_ids) - trajectory.prompt_length
    assert [replica.serving for replica in streams.read_replicas().values()] == [first]
    wait_until(lambda: list_waiting(health) == set())

    # One prompt off the streams goes through the same loop.
    with grpc.insecure_channel(addresses["rollout.grpc_address"]) as channel:
        stub = RolloutStub(channel)
        reply = stub.Run(RunRequest(prompt=build_prompt(99, 0, 0, samples=16)), timeout=300)
        searches = [
            turn for t in reply.group.trajectories for turn in t.turns if turn.action == ActionKind.ACTION_KIND_SEARCH
        ]
        assert any(turn.executed and turn.documents and turn.index_digest for turn in searches)
        with pytest.raises(grpc.RpcError, match=r"prompt.messages is \[\]"):
            stub.Run(RunRequest(), timeout=300)
        assert stub.GetStatus(GetStatusRequest(), timeout=300).serving == first

    # A newer policy is followed.
    second = publish(streams, model, tmp_path / "runs", 1, 1)
    streams.issue(build_prompt(1, 2, 1))
    (group,) = take(streams, 1)
    assert {(s.version, s.epoch) for t in group.trajectories for s in t.segments} == {(1, 1)}
    assert [replica.serving for replica in streams.read_replicas().values()] == [second]
    wait_until(lambda: "forage_rollout_policy_version 1.0" in get(health, "/metrics")[1])
    wait_until(lambda: "forage_rollout_groups_done_total 2.0" in get(health, "/metrics")[1])

    # Killed with work in flight: nothing of it is left running, and the next life does the work, each prompt once.
    family = psutil.Process(service.pid).children(recursive=True)
    for position in range(8):
        streams.issue(build_prompt(position, 3, 1, samples=8))
    wait_until(lambda: streams.count_backlog(streams.trajectories) > 0)
    service.kill()
    end(service, family)
    service = services.start("rollout", *common)
    groups = take(streams, 8)
    assert sorted(group.position for group in groups) == list(range(8))
    assert take(streams, 1, 5.0) == []
    assert streams.count_backlog(streams.prompts) == 0

    # On SIGTERM it ends, and all its processes with it.
    family = psutil.Process(service.pid).children(recursive=True)
    service.send_signal(signal.SIGTERM)
    assert end(service, family) == 0
