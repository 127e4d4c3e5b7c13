"""Replays of stored trajectories over real channels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from stored_trajectories import build_stored, score

from forage_proto.v1.reward_pb2 import ScoredItem, ScoreRequest, ScoreResponse
from forage_proto.v1.reward_pb2_grpc import RewardServicer, add_RewardServicer_to_server
from forage_proto.v1.rollout_pb2 import RunRequest, RunResponse
from forage_proto.v1.rollout_pb2_grpc import RolloutServicer, add_RolloutServicer_to_server
from forage_proto.v1.trajectory_pb2 import (
    Score,
    Status,
    Trajectory,
    TrajectoryGroup,
)
from forage_records.replay import build_prompt, find_divergence, is_scored, make_rerun, make_rescore
from forage_runtime.clients.concurrency import map_concurrently
from forage_runtime.clients.reward import RewardClient
from forage_runtime.clients.rollout import RolloutClient
from forage_runtime.errors import DataError, SettingsError, UnavailableError
from forage_runtime.settings import RewardSettings, RolloutSettings, Settings


class Judge(RewardServicer):
    """Gives 0.9 to all but one, which it refuses."""

    def __init__(self) -> None:
        self.asked: list[ScoreRequest] = []

    async def Score(self, request: ScoreRequest, context: Any) -> ScoreResponse:  # the name is gRPC's
        self.asked.append(request)
        (item,) = request.items
        if item.data_source == "unknown":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no reward for data source 'unknown'")
        new = score(0.9, em=0.2, format=0.7)
        return ScoreResponse(
            items=[ScoredItem(trajectory_id=item.trajectory_id, score=new, validation_score=score(1.0))]
        )


class Sampler(RolloutServicer):
    """Answers every prompt with the same tokens; asks for a token where it has one."""

    def __init__(self) -> None:
        self.asked: list[RunRequest] = []
        self.token = ""

    async def Run(self, request: RunRequest, context: Any) -> RunResponse:  # the name is gRPC's
        presented = dict(context.invocation_metadata()).get("authorization", "")
        if self.token and presented != f"Bearer {self.token}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this service asks for a token")
        self.asked.append(request)
        if request.prompt.data_source == "unknown":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "prompt.token_ids is 9")
        ids = [*request.prompt.token_ids, 10, 11, 90, 91, 13]
        new = Trajectory(id="new/0", sample=0, token_ids=ids, prompt_length=len(request.prompt.token_ids))
        return RunResponse(group=TrajectoryGroup(trajectories=[new]))


@pytest.fixture
async def services(free_address: Callable[[], str]) -> AsyncIterator[tuple[Settings, Judge, Sampler]]:
    judge, sampler = Judge(), Sampler()
    addresses = free_address(), free_address()
    servers = []
    for address, add, servicer in (
        (addresses[0], add_RewardServicer_to_server, judge),
        (addresses[1], add_RolloutServicer_to_server, sampler),
    ):
        server = grpc.aio.server()
        add(servicer, server)
        server.add_insecure_port(address)
        await server.start()
        servers.append(server)
    rollout = RolloutSettings(grpc_address=addresses[1], score_timeout_s=1.0)
    yield Settings(reward=RewardSettings(grpc_address=addresses[0]), rollout=rollout), judge, sampler
    for server in servers:
        await server.stop(None)


async def test_the_same_text_gets_the_score_of_the_running_reward(services: tuple[Settings, Judge, Sampler]) -> None:
    settings, judge, _ = services
    one = build_stored()
    new = await make_rescore(RewardClient(settings), "<end>")(one)
    assert new.score.total == 0.9
    assert one.score.total == 0.2  # what was stored is untouched
    assert (new.id, new.token_ids, new.status) == (one.id, one.token_ids, Status.STATUS_OK)
    (item,) = judge.asked[0].items
    assert (item.end_of_turn, item.spans[0].text, list(item.ground_truth.targets)) == ("<end>", "me", ["me"])
    with pytest.raises(DataError, match="run/world/test/0/0/3: no reward for data source 'unknown'"):
        await make_rescore(RewardClient(settings), "")(build_stored(data_source="unknown"))


async def test_a_trajectory_that_failed_in_the_reward_gets_a_score(services: tuple[Settings, Judge, Sampler]) -> None:
    failed = build_stored(status=Status.STATUS_TIMEOUT, status_detail="away", score=Score(status=Status.STATUS_TIMEOUT))
    assert is_scored(failed)
    assert not is_scored(build_stored(status=Status.STATUS_TIMEOUT, score=None))
    new = await make_rescore(RewardClient(services[0]), "")(failed)
    assert (new.status, new.status_detail) == (Status.STATUS_OK, "")


async def test_the_same_prompt_is_sampled_with_the_seed_of_its_sample(
    services: tuple[Settings, Judge, Sampler],
) -> None:
    settings, _, sampler = services
    async with RolloutClient(settings) as rollout:
        new = await make_rerun(rollout, "replay")(build_stored())
        with pytest.raises(DataError, match=r"prompt\.token_ids is 9"):
            await make_rerun(rollout, "replay")(build_stored(data_source="unknown"))
    asked = sampler.asked[0].prompt
    assert (list(asked.token_ids), asked.samples, asked.sampling.seed) == ([1, 2], 1, 43)
    assert (new.id, new.sample, new.sampling.seed) == (build_stored().id, 3, 40)  # as if it were the stored one
    assert find_divergence(build_stored(), new) == "turn 2"


async def test_the_token_of_the_settings_is_presented(
    services: tuple[Settings, Judge, Sampler], tmp_path: Path
) -> None:
    settings, _, sampler = services
    sampler.token = "secret"
    async with RolloutClient(settings) as rollout:
        with pytest.raises(SettingsError, match=r"asks for a token: set rollout\.auth_token_file"):
            await rollout.run(build_prompt(build_stored(), "r"))
    file = tmp_path / "token"
    file.write_text("secret\n")
    rollout_settings = settings.rollout.model_copy(update={"auth_token_file": file})
    async with RolloutClient(settings.model_copy(update={"rollout": rollout_settings})) as rollout:
        assert (await rollout.run(build_prompt(build_stored(), "r"))).trajectories


async def test_an_unavailable_service_is_waited_for_within_a_deadline(free_address: Callable[[], str]) -> None:
    limits = RolloutSettings(grpc_address=free_address(), trajectory_timeout_s=0.2, score_timeout_s=0.2)
    client = RolloutClient(Settings(rollout=limits))
    client._timeout_s = 1.0
    with pytest.raises(UnavailableError, match="gave no answer within 1 s"):
        await client.run(build_prompt(build_stored(), "r"))
    await client.close()


async def test_work_in_flight_is_bounded_read_lazily_and_stopped_by_the_first_failure() -> None:
    read: list[int] = []
    most = running = cancelled = 0

    def iterate_items() -> Any:
        for number in range(20):
            read.append(number)
            yield number

    async def do_work(number: int) -> int:
        nonlocal most, running, cancelled
        running += 1
        most = max(most, running)
        try:
            if number == 7:
                raise ValueError("seven")
            await asyncio.sleep(0.01 if number < 7 else 10)
        except asyncio.CancelledError:
            cancelled += 1
            raise
        finally:
            running -= 1
        return number

    done = []

    async def collect_all() -> None:
        async for item, result in map_concurrently(iterate_items(), do_work, 3):
            assert item == result
            done.append(item)

    with pytest.raises(ValueError, match="seven"):
        await collect_all()
    await asyncio.sleep(0)
    assert most == 3
    assert set(done) <= set(range(7))
    assert len(read) <= 11
    assert running == 0
