"""Room for the bytes of requests: who waits, who is turned away, and that all of it comes back."""

from __future__ import annotations

import asyncio
import random

import pytest
from loop_clock import LoopClock, loop_clock

from forage_proto.v1.reward_pb2 import ScoreItem
from forage_proto.v1.trajectory_pb2 import Span
from forage_runtime.clients.calls import RefusedError
from forage_runtime.clients.reward import split_items
from forage_runtime.security.byte_budget import NoRoomError, RequestByteBudget

MIB = 2**20
__all__ = ["loop_clock"]


async def pause(turns: int) -> None:
    """Let the other tasks go on."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def test_requests_wait_in_order_for_room_and_get_what_others_give_back() -> None:
    room = RequestByteBudget(10 * MIB, 8 * MIB)
    first = await room.take(8 * MIB)
    large = asyncio.create_task(room.take(8 * MIB))
    await asyncio.sleep(0)
    small = asyncio.create_task(room.take(1 * MIB))
    await pause(5)
    assert not large.done()
    assert not small.done()  # there is room for it, and it would keep the large one waiting for ever
    first.shrink(1 * MIB)
    await asyncio.gather(large, small)
    first.shrink(0)
    large.result().shrink(0)
    small.result().shrink(0)
    (await room.take(10 * MIB, 0.1)).shrink(0)


async def test_who_waits_too_long_is_told_what_is_in_progress() -> None:
    room = RequestByteBudget(8 * MIB, 8 * MIB)
    place = await room.take(8 * MIB)
    with pytest.raises(NoRoomError, match="requests of 8 MiB are in progress, the limit is 8 MiB: send it later"):
        await room.take(1, 0.01)
    place.shrink(0)
    (await room.take(8 * MIB, 0.1)).shrink(0)


async def test_no_byte_is_lost_by_callers_that_give_up_at_any_moment() -> None:
    choose = random.Random(7)
    room = RequestByteBudget(10, 10)
    held = 0

    async def use() -> None:
        nonlocal held
        size = choose.randint(1, 10)
        place = await room.take(size, choose.choice((None, 0.0)))
        held += size
        assert held <= 10
        try:
            await pause(choose.randrange(5))
        finally:
            held -= size
            place.shrink(0)

    tasks = [asyncio.create_task(use()) for _ in range(300)]
    for task in tasks[::3]:
        await pause(choose.randrange(2))
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert held == 0
    (await room.take(10, 0.1)).shrink(0)


async def test_a_time_out_that_meets_a_grant_keeps_the_room(loop_clock: LoopClock) -> None:
    """From Python 3.12 on `asyncio.wait_for` ends such a wait with TimeoutError, though the future has a result."""
    room, loop = RequestByteBudget(8, 8), asyncio.get_running_loop()
    for _ in range(3):
        held = await room.take(8)
        waiting = asyncio.create_task(room.take(8, 100.0))
        await pause(3)
        loop.call_later(99.0, held.shrink, 0)  # both are due in one round of the loop, the grant first
        loop_clock.skip(200.0)
        (await waiting).shrink(0)
    (await room.take(8, 0.1)).shrink(0)


async def test_a_cancelled_wait_that_meets_a_grant_gives_the_room_back() -> None:
    room = RequestByteBudget(8, 8)
    held = await room.take(8)
    waiting = asyncio.create_task(room.take(8, 100.0))
    await pause(3)
    held.shrink(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    (await room.take(8, 0.1)).shrink(0)


def test_a_large_batch_is_sent_in_parts_that_the_service_reads() -> None:
    items = [ScoreItem(trajectory_id=f"t{number}", spans=[Span(text="x" * 1000)]) for number in range(100)]
    batches = list(split_items(items, most=10_500))
    assert [item for batch in batches for item in batch] == items
    assert {len(batch) for batch in batches[:-1]} == {10}
    assert [len(batch) for batch in split_items([*items[:3]], most=10)] == [1, 1, 1]
    assert list(split_items([])) == []
    with pytest.raises(RefusedError, match=r"trajectory huge has 33554.* bytes, and rewards read"):
        list(split_items([ScoreItem(trajectory_id="huge", spans=[Span(text="x" * 32 * MIB)])]))
