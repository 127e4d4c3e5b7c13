"""The canary on the real engine: a policy serves once it gives the trainer's log-probabilities, and never before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from canary_engine import CanaryEngine, run_canary_engine

from forage_weights.announcement import PolicyError
from forage_weights.rollout.canary import CanaryError
from forage_weights.rollout.policy import NotServingError

pytestmark = [pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one(
    make_model: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[CanaryEngine]:
    """The engine of all tests, which serves the initial policy at first."""
    async with run_canary_engine(make_model, tmp_path_factory) as running:
        await running.engine.load_policy(running.describe("a", version=0))
        assert running.engine.counts.canary_failures == 0
        running.initial = running.engine._instance.bounds.fresh
        yield running


@pytest.fixture(autouse=True)
def loads_in_place(one: CanaryEngine) -> None:
    """Whatever another test has found wrong."""
    one.load_in_place_again()


async def test_the_initial_policy_tells_by_what_the_two_libraries_differ(one: CanaryEngine) -> None:
    assert one.initial is not None
    assert one.initial < 1e-4


async def test_a_right_load_is_served_and_a_generation_goes_on_under_it(one: CanaryEngine) -> None:
    fresh_loads, generating = one.engine.counts.fresh_loads, asyncio.create_task(one.generate(tokens=200))
    await asyncio.sleep(0)
    policy = one.describe("b")
    await one.engine.load_policy(policy)
    assert one.engine.difference is not None
    assert one.engine.difference < 1e-4
    assert (await generating)[-1][0] == policy.version
    assert one.engine.counts.fresh_loads == fresh_loads


async def test_a_canary_that_cannot_be_scored_is_refused_before_anything_is_loaded(one: CanaryEngine) -> None:
    before, policy = one.engine.serving, one.describe("a")
    policy.canary.rows[1].token_ids[5] = 2**31
    with pytest.raises(PolicyError, match="row 1 has token 2147483648, expected fewer than"):
        await one.engine.load_policy(policy)
    assert one.engine.serving == before
    assert await one.generate()


async def test_it_works_in_a_pause_and_leaves_the_engine_paused(one: CanaryEngine) -> None:
    await one.engine.pause(drain=False)
    generating = asyncio.create_task(one.generate())
    policy = one.describe("c")
    await one.engine.load_policy(policy)
    assert one.engine.is_paused
    assert not generating.done()
    await one.engine.resume()
    assert (await generating)[0][0] == policy.version


async def test_what_was_put_in_place_without_a_cache_is_checked_before_requests_that_waited(one: CanaryEngine) -> None:
    await one.engine.fall_asleep()
    generating, one.engine._loader.canary.difference = asyncio.create_task(one.generate()), None
    await one.engine.wake_weights()
    policy = one.describe("b")
    await one.engine.load_policy(policy)
    assert one.engine.difference is None
    await one.engine.wake_up()
    assert one.engine.difference is not None
    assert (await generating)[0][0] == policy.version


async def test_a_fault_of_a_load_in_place_is_found_and_the_policy_loaded_afresh(one: CanaryEngine) -> None:
    before = one.describe("a")
    await one.engine.load_policy(before)
    running = [asyncio.create_task(one.generate(tokens=200)) for _ in range(4)]
    await asyncio.sleep(0)
    policy = await one.load_wrongly("b", "left-out")
    done = await asyncio.gather(*running, return_exceptions=True)
    sampled = {version for found in done if not isinstance(found, BaseException) for version, *_ in found}
    assert sampled <= {before.version}, "nothing was sampled from what was loaded wrongly"
    assert all(isinstance(found, NotServingError) for found in done if isinstance(found, BaseException))
    assert one.engine.serving == policy
    assert not one.engine.out_of_service
    assert (await one.generate())[0][:2] == (policy.version, 1)


async def test_after_a_fault_the_next_policy_is_loaded_afresh_and_running_generations_end_first(
    one: CanaryEngine,
) -> None:
    await one.engine.load_policy(one.describe("a"))
    await one.load_wrongly("b", "left-out")
    fresh, before = one.engine.counts.fresh_loads, one.engine.serving
    assert before is not None
    generating = asyncio.create_task(one.generate(tokens=100))
    await asyncio.sleep(0)
    await one.engine.load_policy(one.describe("a"))
    assert [version for version, *_ in await generating] == [before.version]
    assert one.engine.counts.fresh_loads == fresh + 1


async def test_a_policy_that_no_load_makes_right_is_not_served_and_the_next_one_is(one: CanaryEngine) -> None:
    with pytest.raises(CanaryError, match=r"policy version \d+ .* differ .* kind qwen2.*rollout\.weights\.canary=warn"):
        await one.engine.load_policy(one.describe("b", canary_of="c"))
    assert "compute different models" in one.engine.out_of_service
    assert one.engine._instance.bounds.fresh is None, "what is wrong does not widen the bound of later loads"
    with pytest.raises(NotServingError, match="compute different models"):
        await one.generate()
    one.load_in_place_again()
    policy = one.describe("c")
    await one.engine.load_policy(policy)
    assert (await one.generate())[0][0] == policy.version


async def test_a_policy_without_log_probabilities_is_served_as_it_is(one: CanaryEngine) -> None:
    policy = one.describe("a")
    policy.ClearField("canary")
    one.engine._loader.canary.difference = None
    await one.engine.load_policy(policy)
    assert one.engine.difference is None
