"""The reward's client before several replicas: real channels, servers that count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from reward_replica import ITEMS, Replica

from forage_runtime.clients.calls import RETRIED
from forage_runtime.clients.reward import RewardClient
from forage_runtime.settings import RolloutSettings, Settings


@pytest.fixture
async def replicas(free_address: Callable[[], str]) -> AsyncIterator[tuple[Replica, Replica]]:
    both = Replica(free_address()), Replica(free_address())
    yield both
    for replica in both:
        await replica.stop()


def open_client(replicas: tuple[Replica, Replica]) -> RewardClient:
    """As of a name that resolves to both."""
    settings = Settings(rollout=RolloutSettings(score_timeout_s=300))
    both = "ipv4:" + ",".join(replica.address for replica in replicas)
    reward = settings.reward.model_copy(update={"grpc_address": both})
    return RewardClient(settings.model_copy(update={"reward": reward}))


async def wait_until(replica: Replica, reward: RewardClient, calls: int) -> None:
    while replica.calls < calls:
        await reward.score(ITEMS)
        await asyncio.sleep(0.01)


async def test_calls_are_distributed_round_robin(replicas: tuple[Replica, Replica]) -> None:
    for replica in replicas:
        await replica.start()
    reward = open_client(replicas)
    for replica in replicas:
        await wait_until(replica, reward, 1)
    before = [replica.calls for replica in replicas]
    for _ in range(20):
        await reward.score(ITEMS)
    assert [replica.calls - b for replica, b in zip(replicas, before, strict=True)] == [10, 10]


async def test_a_stopped_replica_fails_no_call_and_is_used_again_after_its_restart(
    replicas: tuple[Replica, Replica],
) -> None:
    (one, other), reward = replicas, open_client(replicas)
    await one.start()
    await other.start()
    await wait_until(one, reward, 1)
    await one.stop()
    before = one.calls
    for _ in range(20):
        assert len(await reward.score(ITEMS)) == 1
    assert one.calls == before
    await one.start()
    await wait_until(one, reward, before + 1)


async def test_connections_closed_at_their_maximum_age_fail_no_call(replicas: tuple[Replica, Replica]) -> None:
    for replica in replicas:
        await replica.start(("grpc.max_connection_age_ms", 100))
    reward, before = open_client(replicas), RETRIED.labels("reward")._value.get()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(8):
            tasks.create_task(_score_for(reward, 0.5))
    assert sum(replica.calls for replica in replicas) >= 8
    assert RETRIED.labels("reward")._value.get() == before


async def _score_for(reward: RewardClient, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while loop.time() < end:
        await reward.score(ITEMS)
        await asyncio.sleep(0.002)
