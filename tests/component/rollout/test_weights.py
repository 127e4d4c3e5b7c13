"""Engines of one machine that share its cache of policies."""

from __future__ import annotations

import asyncio
from pathlib import Path

from model_folders import write_smallest_model
from whole_policy import announce_whole

from forage_weights.cache import PolicyCache
from forage_weights.rollout.preparation import hold_policy

WEIGHTS = "model.safetensors"


async def test_engines_of_one_machine_may_fetch_at_the_same_time(tmp_path: Path) -> None:
    folder = write_smallest_model(tmp_path)
    policy = announce_whole(folder, f"simplecache::file://{folder}")

    async def hold() -> list[Path]:
        async with hold_policy(PolicyCache(tmp_path / "cache"), policy) as held:
            return held.files

    found = await asyncio.gather(*[hold() for _ in range(8)])
    assert len({files[0] for files in found}) == 1
    assert len([entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]) == 1


async def test_an_update_that_is_cancelled_lets_go_of_its_policy(tmp_path: Path) -> None:
    folder, cache = write_smallest_model(tmp_path), PolicyCache(tmp_path / "cache", readers_limit_s=300)
    policy = announce_whole(folder, f"simplecache::file://{folder}")
    async with hold_policy(cache, policy) as held:
        copy = held.files[0]

    async def update(holds: asyncio.Event) -> None:
        async with hold_policy(cache, policy):
            holds.set()
            await asyncio.Event().wait()

    for moment in ("before it fetches", "while it fetches", "after that"):
        holds = asyncio.Event()
        updating = asyncio.create_task(update(holds))
        if moment == "while it fetches":
            await asyncio.sleep(0)
        elif moment == "after that":
            await holds.wait()
        updating.cancel()
        await asyncio.gather(updating, return_exceptions=True)
    copy.write_bytes(b"damaged: only who holds it alone can replace it")
    async with hold_policy(cache, policy) as held:
        assert held.files[0].read_bytes() == (folder / WEIGHTS).read_bytes()
