"""An outage of the reward under the rollout service: the real agent and dispatcher over real gRPC."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import pytest
from dispatcher_bench import take_groups
from faulty_services import (
    MakeParts,
    Parts,
    build_prompt,
)
from prometheus_client import CollectorRegistry, generate_latest
from waiting import WAIT_S, wait_until_async

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_proto.v1.trajectory_pb2 import (
    Policy,
    Prompt,
    Replica,
    Status,
    TrajectoryGroup,
)
from forage_queue.rollout.dispatcher import Dispatcher
from forage_queue.streams.client import StreamClient
from forage_rollout.deployments.readiness import wait_for_services
from forage_rollout.metrics import RolloutCollector, Snapshot, read_call_counts
from forage_runtime.settings import (
    RedisSettings,
)
from forage_trajectory.codec import pack_group


class Front:
    """A dispatcher over the agent, the reward as a process, and the trainer's end of the streams."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.trainer = StreamClient(parts.settings.redis, "r", 60.0)
        self.trainer.create_groups()
        self.trainer.publish(Policy(version=1, epoch=1))
        self.issued = 0

    def issue(self, count: int) -> None:
        for position in range(self.issued, self.issued + count):
            self.trainer.issue(build_prompt(group_uid=f"g/train/{position}/0", position=position, samples=2))
        self.issued += count

    async def claim(self, count: int, timeout_s: float = WAIT_S) -> list[TrajectoryGroup]:
        return await take_groups(self.trainer, count, timeout_s)

    def read_metric(self, name: str) -> float:
        """Read a metric of the reward's client from the metrics page; 0 where it is missing."""
        collector, registry = RolloutCollector(), CollectorRegistry()
        collector.update({"Agent": [Snapshot("r1", read_call_counts())]}, None, None)
        registry.register(collector)
        page = generate_latest(registry).decode()
        lines = [line for line in page.splitlines() if line.startswith(f'forage_rollout_{name}{{service="reward"}} ')]
        return float(lines[0].rpartition(" ")[2]) if lines else 0.0


@asynccontextmanager
async def run_dispatcher(parts: Parts) -> AsyncIterator[Front]:
    settings = parts.settings

    async def ask_engines() -> dict[str, Replica]:
        return {"engine": Replica(serving=Policy(version=1, epoch=1))}

    async def run_packed(asked: Prompt) -> PackedGroup:
        return pack_group(await parts.agent.run_group(asked))

    front = Front(parts)
    streams = StreamClient(settings.redis, "r", 1.0)
    dispatcher = Dispatcher(settings, streams, "one", run_packed, ask_engines, partial(wait_for_services, settings))
    task = asyncio.create_task(dispatcher.run())
    yield front
    task.cancel()
    await asyncio.wait([task])


@dataclass
class RewardProcess:
    """The real service, which can be killed and started again where it was."""

    address: str
    start: Callable[[], subprocess.Popen[str]]
    process: subprocess.Popen[str]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.process = self.start()


@pytest.fixture
def reward(
    start_service: Callable[..., subprocess.Popen[str]],
    wait_until_ready: Callable[..., None],
    free_address: Callable[[], str],
) -> RewardProcess:
    address, health = free_address(), free_address()
    route = "reward.routes.s={name: em}"
    start = partial(start_service, "reward", f"reward.grpc_address={address}", f"reward.health_address={health}", route)
    process = start()
    wait_until_ready(process, health)
    return RewardProcess(address, start, process)


@pytest.mark.parametrize(("score_timeout_s", "scored"), [(300.0, True), (8.0, False)])
async def test_no_group_is_lost_while_the_reward_is_unavailable_and_the_circuit_opens(
    make_parts: MakeParts, reward: RewardProcess, redis_server: RedisSettings, score_timeout_s: float, scored: bool
) -> None:
    """Groups under way get their scores late, or a status where the limit of scoring is shorter than the outage; the
    rest waits on the stream."""
    parts = make_parts(reward.address, redis_server, score_timeout_s=score_timeout_s, max_trajectories_in_flight=8, n=2)
    async with run_dispatcher(parts) as front:
        front.issue(4)
        assert {t.status for group in await front.claim(4) for t in group.trajectories} == {Status.STATUS_OK}
        opened = front.read_metric("circuits_opened_total")
        open_before = front.read_metric("circuit_open")  # of clients of earlier tests

        reward.kill()
        front.issue(12)
        await wait_until_async(lambda: front.read_metric("circuit_open") == open_before + 1)
        assert front.read_metric("circuits_opened_total") > opened
        groups = [] if scored else await front.claim(1)  # with a status: the outage is longer than the limit
        await asyncio.sleep(2.0)
        reward.restart()

        groups += await front.claim(12 - len(groups))
        front.issue(4)  # a circuit closes with a call that goes through
        groups += await front.claim(4)
        assert front.read_metric("circuit_open") == open_before
        assert await front.claim(1, 1.0) == []
        assert sorted(group.position for group in groups) == list(range(4, 20))
        assert front.trainer.count_backlog(front.trainer.prompts) == 0

    late = [t for group in groups for t in group.trajectories if t.status == Status.STATUS_OK]
    failed = [t for group in groups for t in group.trajectories if t.status != Status.STATUS_OK]
    assert all(t.score.total == 1.0 for t in late)
    # A sample that timed out has a status instead of a score of 0; only samples in flight at the kill can time out.
    assert {(t.status, t.score.status) for t in failed} <= {(Status.STATUS_TIMEOUT, Status.STATUS_TIMEOUT)}
    assert all("the reward at" in t.status_detail for t in failed)
    assert len(failed) == 0 if scored else 0 < len(failed) <= 8
