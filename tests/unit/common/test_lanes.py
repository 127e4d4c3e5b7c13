"""Clients of one connection each, shared by many requests."""

from __future__ import annotations

import asyncio

import httpx  # lint: socket because no client is connected
import pytest

from forage_common.clients.lanes import Lanes


async def test_no_more_clients_than_allowed_are_in_use_and_requests_wait_in_their_order() -> None:
    made, order, most = [], [], 0

    def make() -> httpx.AsyncClient:
        made.append(httpx.AsyncClient())
        return made[-1]

    lanes = Lanes(make, 3)

    async def use(number: int) -> None:
        nonlocal most
        async with lanes.take() as client:
            assert client not in in_use
            in_use.add(client)
            order.append(number)
            most = max(most, len(in_use))
            await asyncio.sleep(0)
            in_use.discard(client)

    in_use: set[httpx.AsyncClient] = set()
    await asyncio.gather(*map(use, range(20)))
    assert (len(made), most, order) == (3, 3, list(range(20)))
    await lanes.close()
    assert all(client.is_closed for client in made)


async def test_a_request_that_fails_or_is_cancelled_gives_its_client_back() -> None:
    lanes = Lanes(httpx.AsyncClient, 1)

    async def fail() -> None:
        async with lanes.take():
            raise ValueError("refused")

    async def wait() -> None:
        async with lanes.take():
            await asyncio.Event().wait()

    with pytest.raises(ValueError, match="refused"):
        await fail()
    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    async with lanes.take() as client:
        assert not client.is_closed
    await lanes.close()
