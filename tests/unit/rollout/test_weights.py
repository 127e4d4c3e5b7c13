"""Transports of policies: fetched from any address and verified."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

import fsspec
import pytest
from model_folders import write_smallest_model, write_weights

from forage_common.files.model_folder import read_model_shapes
from forage_common.v1.trajectory_pb2 import Policy, PolicyFile
from forage_rollout.engine.leases import Leases
from forage_rollout.weights.filesystem import MAX_KEPT, FilesystemTransport
from forage_rollout.weights.policy import NotServingError, PolicyError

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_smallest_model(tmp_path)


def compute_sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def publish(folder: Path, uri: str, version: int = 1) -> Policy:
    """The model's weights at an address, announced."""
    content = (folder / WEIGHTS).read_bytes()
    with fsspec.open(f"{uri}/{WEIGHTS}", "wb") as stream:
        stream.write(content)
    return Policy(version=version, epoch=1, uri=uri, digest=compute_sha256(content))


def write_altered(folder: Path, byte: int) -> Path:
    """Other weights of the same shapes."""
    file = folder / WEIGHTS
    content = bytearray(file.read_bytes())
    content[-1] = byte
    file.write_bytes(content)
    return folder


async def test_a_local_policy_is_read_in_place(folder: Path, tmp_path: Path) -> None:
    transport = FilesystemTransport(read_model_shapes(folder), tmp_path / "cache")
    digest = compute_sha256((folder / WEIGHTS).read_bytes())
    for uri in (str(folder), f"file://{folder}"):
        assert await transport.prepare(Policy(version=1, epoch=1, uri=uri, digest=digest)) == [folder / WEIGHTS]
    assert not (tmp_path / "cache").exists()


async def test_a_remote_policy_is_fetched_once_and_again_when_its_copy_is_damaged(folder: Path, tmp_path: Path) -> None:
    transport = FilesystemTransport(read_model_shapes(folder), tmp_path / "cache")
    policy = publish(folder, "memory://fetched-once/v1")
    [path] = await transport.prepare(policy)
    assert path.read_bytes() == (folder / WEIGHTS).read_bytes()
    path.write_bytes(b"x")
    assert await transport.prepare(policy) == [path]
    assert path.read_bytes() == (folder / WEIGHTS).read_bytes()
    fsspec.filesystem("memory").rm("/fetched-once", recursive=True)
    assert await transport.prepare(policy) == [path]  # from the cache
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [path.parent.name]


async def test_a_damaged_or_missing_remote_policy_is_refused_and_leaves_no_copy(folder: Path, tmp_path: Path) -> None:
    transport = FilesystemTransport(read_model_shapes(folder), tmp_path / "cache")
    policy = publish(folder, "memory://torn/v1")
    with fsspec.open(f"{policy.uri}/{WEIGHTS}", "wb") as stream:
        stream.write((folder / WEIGHTS).read_bytes()[:-5])
    with pytest.raises(PolicyError, match="has digest"):
        await transport.prepare(policy)
    fsspec.filesystem("memory").rm("/torn", recursive=True)
    with pytest.raises(PolicyError, match="cannot be fetched"):
        await transport.prepare(policy)
    assert list((tmp_path / "cache").iterdir()) == []


async def test_an_address_that_no_file_system_reads_is_refused(folder: Path, tmp_path: Path) -> None:
    transport = FilesystemTransport(read_model_shapes(folder), tmp_path / "cache")
    with pytest.raises(PolicyError, match="no file system reads this address"):
        await transport.prepare(Policy(version=1, epoch=1, uri="nowhere://bucket/v1", digest="0" * 64))


async def test_shards_come_together_in_the_announced_order(folder: Path, tmp_path: Path) -> None:
    expected = read_model_shapes(folder)
    files = []
    for name, shapes in (("b.safetensors", {"embed": [4, 2]}), ("a.safetensors", {"norm": [2]}), ("notes.txt", None)):
        if shapes is not None:
            write_weights(tmp_path / name, shapes)
        else:
            (tmp_path / name).write_text("not weights")
        content = (tmp_path / name).read_bytes()
        with fsspec.open(f"memory://shards/{name}", "wb") as stream:
            stream.write(content)
        files.append(PolicyFile(name=name, digest=compute_sha256(content), bytes=len(content)))
    transport = FilesystemTransport(expected, tmp_path / "cache")
    policy = Policy(version=1, epoch=1, uri="memory://shards", files=files)
    names = [path.name for path in await transport.prepare(policy)]
    assert names == ["b.safetensors", "a.safetensors"]


async def test_the_cache_keeps_the_policies_used_last(folder: Path, tmp_path: Path) -> None:
    transport = FilesystemTransport(read_model_shapes(folder), tmp_path / "cache")
    used = []
    for version in range(MAX_KEPT + 2):
        policy = publish(write_altered(folder, version), f"memory://pruned/v{version}", version)
        [path] = await transport.prepare(policy)
        used.append(path.parent)
        os.utime(used[-1], (version, version))  # the clock of a file system may be coarse
    assert {entry.name for entry in (tmp_path / "cache").iterdir()} == {folder.name for folder in used[-MAX_KEPT:]}


async def test_engines_of_one_machine_may_fetch_at_the_same_time(folder: Path, tmp_path: Path) -> None:
    digest = compute_sha256((folder / WEIGHTS).read_bytes())
    policy = Policy(version=1, epoch=1, uri=f"simplecache::file://{folder}", digest=digest)
    engines = [FilesystemTransport(read_model_shapes(folder), tmp_path / "cache") for _ in range(8)]
    shipments = await asyncio.gather(*[engine.prepare(policy) for engine in engines])
    assert len({shipment[0] for shipment in shipments}) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


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
