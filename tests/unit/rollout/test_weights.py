"""Policies that engines hold while they read them, and leases of trajectories on the served one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from model_folders import write_smallest_model
from whole_policy import announce_whole

from forage_rollout.engine.leases import Leases
from forage_weights.cache import PolicyCache
from forage_weights.rollout.policy import NotServingError
from forage_weights.rollout.preparation import hold_policy

WEIGHTS = "model.safetensors"


async def test_a_local_policy_is_read_in_place(tmp_path: Path) -> None:
    folder, cache = write_smallest_model(tmp_path), PolicyCache(tmp_path / "cache")
    for uri in (str(folder), f"file://{folder}"):
        async with hold_policy(cache, announce_whole(folder, uri)) as held:
            assert held.files == [folder / WEIGHTS]
    assert not (tmp_path / "cache").exists()


async def test_a_release_ends_the_waiting_for_a_lease_that_nobody_would_release_again() -> None:
    leases = Leases(limit_s=300)
    await leases.acquire("old")
    update = asyncio.create_task(drain(leases))
    late, other = (asyncio.create_task(leases.acquire(name)) for name in ("late", "other"))
    await until_all_wait()
    await leases.release("late")  # its samples have timed out; the word that they are cancelled is still on its way
    with pytest.raises(NotServingError, match="late was released"):
        await late
    await leases.release("old")
    await update
    await other
    second = asyncio.create_task(drain(leases))
    await leases.release("other")
    await second
    await leases.acquire("late")  # the group is run again


async def until_all_wait() -> None:
    """Let the other tasks go on for as long as they can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def drain(leases: Leases) -> None:
    async with leases.drain():
        pass


async def test_an_update_waits_for_every_lease_and_new_leases_wait_for_the_update() -> None:
    leases, order = Leases(limit_s=300), []

    async def update() -> None:
        async with leases.drain():
            order.append("updating")
            await until_all_wait()
            order.append("updated")

    async def join_late() -> None:
        await leases.acquire("late")
        order.append("late")

    await leases.acquire("early")
    tasks = [asyncio.create_task(update())]
    await until_all_wait()
    tasks.append(asyncio.create_task(join_late()))
    await leases.acquire("early")  # a later turn of the same trajectory does not wait
    await until_all_wait()
    assert order == []
    await leases.release("early")
    await asyncio.gather(*tasks)
    assert order == ["updating", "updated", "late"]


async def test_a_lease_that_is_never_released_expires() -> None:
    leases = Leases(limit_s=0.01)
    await leases.acquire("lost")
    await drain(leases)
    await leases.release("lost")  # and its owner may still say so


async def test_new_leases_are_given_after_a_cancelled_update() -> None:
    leases = Leases(limit_s=300)
    await leases.acquire("early")

    async def update() -> None:
        async with leases.drain():
            raise AssertionError("a lease is held")

    waiting = asyncio.create_task(update())
    await until_all_wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await leases.acquire("late")
