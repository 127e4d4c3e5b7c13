"""Policies that engines hold while they read them, and leases of trajectories on the served one."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest
from model_folders import write_smallest_model

from forage_common.v1.trajectory_pb2 import Policy
from forage_policies.cache import PolicyCache
from forage_rollout.engine.leases import Leases
from forage_rollout.weights.holding import hold_policy
from forage_rollout.weights.policy import NotServingError

WEIGHTS = "model.safetensors"


def announce(folder: Path, uri: str) -> Policy:
    return Policy(version=1, epoch=1, uri=uri, digest=hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest())


async def test_a_local_policy_is_read_in_place(tmp_path: Path) -> None:
    folder, cache = write_smallest_model(tmp_path), PolicyCache(tmp_path / "cache")
    for uri in (str(folder), f"file://{folder}"):
        async with hold_policy(cache, announce(folder, uri)) as held:
            assert held.files == [folder / WEIGHTS]
    assert not (tmp_path / "cache").exists()


async def test_engines_of_one_machine_may_fetch_at_the_same_time(tmp_path: Path) -> None:
    folder = write_smallest_model(tmp_path)
    policy = announce(folder, f"simplecache::file://{folder}")

    async def hold() -> list[Path]:
        async with hold_policy(PolicyCache(tmp_path / "cache"), policy) as held:
            return held.files

    found = await asyncio.gather(*[hold() for _ in range(8)])
    assert len({files[0] for files in found}) == 1
    assert len([entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]) == 1


async def test_an_update_that_is_cancelled_lets_go_of_its_policy(tmp_path: Path) -> None:
    folder, cache = write_smallest_model(tmp_path), PolicyCache(tmp_path / "cache", readers_limit_s=10)
    policy = announce(folder, f"simplecache::file://{folder}")
    async with hold_policy(cache, policy) as held:
        copy = held.files[0]

    async def update() -> None:
        async with hold_policy(cache, policy):
            await asyncio.Event().wait()

    for pauses in (0, 1, 50):  # before, while and after it fetches
        updating = asyncio.create_task(update())
        for _ in range(pauses):
            await asyncio.sleep(0.001)
        updating.cancel()
        await asyncio.gather(updating, return_exceptions=True)
    copy.write_bytes(b"damaged: only who holds it alone can replace it")
    async with hold_policy(cache, policy) as held:
        assert held.files[0].read_bytes() == (folder / WEIGHTS).read_bytes()


async def test_a_release_ends_the_waiting_for_a_lease_that_nobody_would_release_again() -> None:
    leases = Leases(limit_s=30)
    await leases.acquire("old")
    update = asyncio.create_task(drain(leases))
    late, other = (asyncio.create_task(leases.acquire(name)) for name in ("late", "other"))
    await asyncio.sleep(0.01)
    await leases.release("late")  # its samples have timed out; the word that they are cancelled is still on its way
    with pytest.raises(NotServingError, match="late was released"):
        await late
    await leases.release("old")
    await update
    await other
    second = asyncio.create_task(drain(leases))
    await leases.release("other")
    await asyncio.wait_for(second, 5)
    await asyncio.wait_for(leases.acquire("late"), 5)  # the group is run again


async def drain(leases: Leases) -> None:
    async with leases.drain():
        pass


async def test_an_update_waits_for_every_lease_and_new_leases_wait_for_the_update() -> None:
    leases, order = Leases(limit_s=30), []

    async def update() -> None:
        async with leases.drain():
            order.append("updating")
            await asyncio.sleep(0.05)
            order.append("updated")

    async def join_late() -> None:
        await leases.acquire("late")
        order.append("late")

    await leases.acquire("early")
    tasks = [asyncio.create_task(update())]
    await asyncio.sleep(0.02)
    tasks.append(asyncio.create_task(join_late()))
    await leases.acquire("early")  # a later turn of the same trajectory does not wait
    await asyncio.sleep(0.02)
    assert order == []
    await leases.release("early")
    await asyncio.gather(*tasks)
    assert order == ["updating", "updated", "late"]


async def test_a_lease_that_is_never_released_expires() -> None:
    leases = Leases(limit_s=0.1)
    await leases.acquire("lost")
    async with asyncio.timeout(5), leases.drain():
        pass
    await leases.release("lost")  # and its owner may still say so


async def test_new_leases_are_given_after_a_cancelled_update() -> None:
    leases = Leases(limit_s=30)
    await leases.acquire("early")

    async def update() -> None:
        async with leases.drain():
            raise AssertionError("a lease is held")

    waiting = asyncio.create_task(update())
    await asyncio.sleep(0.02)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(5):
        await leases.acquire("late")
