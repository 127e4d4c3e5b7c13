"""Planted faults of loads in place, each found by the canary; and those that come at the worst moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import pytest_asyncio
from canary_engine import CanaryEngine, run_canary_engine

from forage_rollout.engine import policy_loader
from forage_weights.announcement import PolicyError
from forage_weights.rollout.policy import NotServingError

pytestmark = [pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one(
    make_model: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[CanaryEngine]:
    async with run_canary_engine(make_model, tmp_path_factory) as running:
        yield running


@pytest.mark.parametrize("fault", ["left-out", "swapped", "old-head"])
async def test_every_fault_is_found_and_the_policy_loaded_afresh(one: CanaryEngine, fault: str) -> None:
    one.load_in_place_again()
    await one.engine.load_policy(one.describe("a"))
    failures, fresh = one.engine.counts.canary_failures, one.engine.counts.fresh_loads
    policy = await one.load_wrongly("b", fault)
    assert one.engine.counts.canary_failures == failures + 1
    assert one.engine.counts.fresh_loads == fresh + 1
    assert (await one.generate())[0][0] == policy.version


async def test_a_fault_that_shows_only_after_a_sleep_loses_what_waited_and_serves_nothing_wrong(
    one: CanaryEngine,
) -> None:
    one.load_in_place_again()
    await one.engine.load_policy(one.describe("a"))
    await one.engine.fall_asleep()
    waiting = asyncio.create_task(one.generate())
    await one.engine.wake_weights()
    policy = await one.load_wrongly("b", "swapped")
    await one.engine.wake_up()
    with pytest.raises(NotServingError):
        await waiting
    assert (await one.generate())[0][0] == policy.version
    assert not one.engine.is_asleep


async def test_a_caller_that_is_cancelled_twice_leaves_no_second_start_behind(one: CanaryEngine) -> None:
    """The follower gives a load up each second while a newer policy is announced."""
    one.load_in_place_again()
    await one.engine.load_policy(one.describe("a"))
    loading = asyncio.create_task(one.load_wrongly("b", "swapped"))
    while not one.engine.is_starting_again:
        await asyncio.sleep(0.01)
    for _ in range(3):
        loading.cancel()
        await asyncio.sleep(0.1)
    assert not loading.done()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert not one.engine.out_of_service
    policy = one.describe("c")
    await one.engine.load_policy(policy)
    assert (await one.generate())[0][0] == policy.version


async def test_a_pause_lasts_over_a_fresh_load(one: CanaryEngine) -> None:
    one.load_in_place_again()
    await one.engine.load_policy(one.describe("a"))
    await one.engine.pause(drain=False)
    policy = await one.load_wrongly("b", "swapped")
    assert one.engine.is_paused
    generating = asyncio.create_task(one.generate())
    await asyncio.sleep(0.5)
    assert not generating.done()
    await one.engine.resume()
    assert (await generating)[0][0] == policy.version


async def test_an_engine_that_does_not_start_again_says_why_and_is_replaced(one: CanaryEngine) -> None:
    one.load_in_place_again()
    await one.engine.load_policy(one.describe("a"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_loader, "lay_out_model", lambda model, weights: nullcontext(one.fault.parent))
        with pytest.raises(PolicyError, match=r"policy version \d+ .* cannot be loaded afresh: .*any model weights"):
            await one.load_wrongly("b", "swapped")
    assert "cannot be loaded afresh" in one.engine.out_of_service
    assert one.engine.has_died, "upon which its replica ends, and Serve starts another"
