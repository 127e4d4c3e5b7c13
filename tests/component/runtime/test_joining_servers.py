"""A server that joins gets its share of calls, because connections have an age: over HTTP and over gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import pytest
from connection_balancer import Balancer, open_balancer
from failing_server import FailingServer, one_search_a_request, open_failing_server
from reward_replica import ITEMS, Replica
from waiting import wait_until_async

from forage_runtime.clients.outgoing import AGE_S, BlockingClient
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.clients.reward import RewardClient
from forage_runtime.security import call_limits
from forage_runtime.settings import RolloutSettings, Settings

LONG_S = 300.0
"""Limit of what must not end by its limit."""
SEARCHES = 40
__all__ = ["one_search_a_request"]


@pytest.fixture
async def two() -> AsyncIterator[tuple[FailingServer, FailingServer]]:
    async with open_failing_server() as first, open_failing_server() as second:
        yield first, second


class Age:
    """The clock by which connections grow old."""

    passed = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.passed


@pytest.fixture
def age(monkeypatch: pytest.MonkeyPatch) -> Age:
    age = Age()
    monkeypatch.setattr("forage_runtime.clients.outgoing.time", SimpleNamespace(monotonic=age.monotonic))
    return age


async def search_at_once(retriever: RetrieverClient) -> None:
    await asyncio.gather(*(retriever.search(["a"]) for _ in range(SEARCHES)))


@pytest.mark.usefixtures("one_search_a_request")
async def test_a_retriever_that_joins_gets_half_of_the_searches(
    two: tuple[FailingServer, FailingServer], age: Age
) -> None:
    first, second = two
    async with open_balancer(first.address) as name, RetrieverClient(name.address, LONG_S) as retriever:
        await search_at_once(retriever)
        name.servers.append(second.address)
        age.passed = AGE_S[0] - 10
        await search_at_once(retriever)
        assert (len(first.requests), len(second.requests)) == (2 * SEARCHES, 0)
        age.passed = AGE_S[1] + 1
        await search_at_once(retriever)
        assert (len(first.requests), len(second.requests)) == (2 * SEARCHES + SEARCHES // 2, SEARCHES // 2)
        assert first.connections <= 3 * SEARCHES / 2


@pytest.mark.usefixtures("one_search_a_request")
async def test_connections_do_not_end_all_at_once(two: tuple[FailingServer, FailingServer], age: Age) -> None:
    first, _ = two
    async with RetrieverClient(first.address, LONG_S) as retriever:
        await search_at_once(retriever)
        age.passed = sum(AGE_S) / 2
        await search_at_once(retriever)
    assert SEARCHES < first.connections < 2 * SEARCHES


async def test_so_do_encoders_rerankers_and_judges(two: tuple[FailingServer, FailingServer], age: Age) -> None:
    first, second = two
    async with open_balancer(first.address) as name:
        client = BlockingClient(f"http://{name.address}", 2**20)

        def ask() -> int:
            return client.request("POST", "embed", {}, LONG_S).status

        assert await asyncio.to_thread(ask) == 200
        name.servers = [second.address]
        assert await asyncio.to_thread(ask) == 200
        assert (len(first.requests), len(second.requests)) == (2, 0)
        age.passed = AGE_S[1] + 1
        assert await asyncio.to_thread(ask) == 200
    assert (len(first.requests), len(second.requests)) == (2, 1)


async def test_a_grpc_server_that_joins_gets_calls(
    free_address: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 60_000 <= 0.9 * call_limits.AGE_MS < 1.1 * call_limits.AGE_MS <= 120_000, "gRPC adds a tenth by chance"
    monkeypatch.setattr(call_limits, "AGE_MS", 100)
    first, second = Replica(free_address()), Replica(free_address())
    async with open_balancer(first.address) as name:
        for replica in (first, second):
            await replica.start(*call_limits.limit_connections())
        reward = open_reward(name)
        await reward.score(ITEMS)
        name.servers = [second.address]

        async def ask_until_the_second_answers() -> None:
            while not second.calls:
                await reward.score(ITEMS)

        asking = asyncio.create_task(ask_until_the_second_answers())
        await wait_until_async(asking.done)
        assert first.calls > 0
        await reward.close()
    for replica in (first, second):
        await replica.stop()


def open_reward(name: Balancer) -> RewardClient:
    settings = Settings(rollout=RolloutSettings(score_timeout_s=300))
    reward = settings.reward.model_copy(update={"grpc_address": name.address})
    return RewardClient(settings.model_copy(update={"reward": reward}))
