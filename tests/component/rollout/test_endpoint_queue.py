"""Requests to an endpoint beyond those that this process makes at a time."""

from __future__ import annotations

import asyncio

from failing_server import FailingServer, build_reply, server
from loop_clock import LoopClock, loop_clock
from waiting import wait_until_async

from forage_rollout.engine.endpoint import Endpoint
from forage_runtime.clients.calls import GIVEN_UP
from forage_runtime.clients.circuit import OPENED
from forage_runtime.clients.concurrency import QUEUED
from forage_runtime.settings import EngineSettings

__all__ = ["loop_clock", "server"]


async def test_completions_that_wait_for_a_connection_of_this_process_do_not_fail(
    server: FailingServer, loop_clock: LoopClock
) -> None:
    """As many as `max_num_seqs` are under way; what waits for one of them says nothing about the server."""
    server.orders = [build_reply({"choices": [{"text": "yes"}]})]
    server.hold()
    endpoint = Endpoint(EngineSettings(endpoint=f"http://{server.address}/v1", max_num_seqs=2))
    opened, given_up = (counter.labels("endpoint")._value.get() for counter in (OPENED, GIVEN_UP))
    asked = [asyncio.create_task(endpoint.complete({}, 300.0)) for _ in range(8)]
    for answered in range(0, 8, 2):
        await wait_until_async(lambda due=answered + 2: len(server.requests) == due)
        assert QUEUED.labels("endpoint")._value.get() == 6 - answered
        loop_clock.skip(250.0)
        server.release(2)
    assert [reply["choices"][0]["text"] for reply in await asyncio.gather(*asked)] == ["yes"] * 8
    assert [counter.labels("endpoint")._value.get() for counter in (OPENED, GIVEN_UP)] == [opened, given_up]
    await endpoint.close()
