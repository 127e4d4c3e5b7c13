"""Clients of one connection each, shared by many requests."""

from __future__ import annotations

import asyncio

import httpx  # lint: socket because no client is connected
import pytest

from forage_runtime.clients.concurrency import QUEUED, Slots
from forage_runtime.clients.lanes import Lanes
from forage_runtime.telemetry.waits import waiting


async def test_no_more_clients_than_allowed_are_in_use_and_requests_wait_in_their_order() -> None:
    made, order, most = [], [], 0

    def make() -> httpx.AsyncClient:
        made.append(httpx.AsyncClient())
        return made[-1]

    lanes, slots = Lanes(make), Slots("lanes", 3)

    async def use(number: int) -> None:
        nonlocal most
        with waiting("answers", on="lanes", limit_s=1.0) as wait:
            async with slots.take(wait):
                with lanes.take() as client:
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


async def test_a_request_that_fails_or_is_cancelled_gives_its_client_and_its_slot_back() -> None:
    made: list[httpx.AsyncClient] = []

    def make() -> httpx.AsyncClient:
        made.append(httpx.AsyncClient())
        return made[-1]

    lanes, slots = Lanes(make), Slots("lanes", 1)

    async def use(error: Exception | None) -> None:
        with waiting("answers", on="lanes", limit_s=1.0) as wait:
            async with slots.take(wait):
                with lanes.take():
                    if error is not None:
                        raise error
                    await asyncio.Event().wait()

    with pytest.raises(ValueError, match="refused"):
        await use(ValueError("refused"))
    running, queued = asyncio.create_task(use(None)), asyncio.create_task(use(None))
    await asyncio.sleep(0)
    assert QUEUED.labels("lanes")._value.get() == 1
    for task in (queued, running):
        task.cancel()
    await asyncio.gather(queued, running, return_exceptions=True)
    with pytest.raises(ValueError, match="again"):
        await use(ValueError("again"))
    assert (len(made), QUEUED.labels("lanes")._value.get()) == (1, 0)
    await lanes.close()
