"""What else happens to an engine while it loads a policy afresh: pauses, probes, deaths, shutdown, and its traces."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from canary_engine import CanaryEngine, run_canary_engine
from waiting import wait_until_async as until

from forage_rollout.engine.leases import Leases
from forage_rollout.engine.openai import OpenAiRoutes
from forage_rollout.vllm_start.fork_server import prepare_fork
from forage_rollout.vllm_start.vllm_args import build_environment
from forage_runtime.settings import EngineSettings
from forage_weights.rollout.canary import CanaryError
from forage_weights.rollout.policy import NotServingError

pytestmark = [pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one(
    make_model: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[CanaryEngine]:
    sizes = EngineSettings(args={"num_gpu_blocks_override": 10})
    os.environ.update(build_environment(sizes))
    prepare_fork()  # as a replica does: every start is shorter
    async with run_canary_engine(make_model, tmp_path_factory, args=sizes.args) as running:
        yield running


async def begin_fresh_load(one: CanaryEngine, name: str = "b") -> asyncio.Task[Any]:
    """A load that has given up the engine before, and waits for another start."""
    one.load_in_place_again()
    before = one.engine.llm
    loading = asyncio.create_task(one.load_wrongly(name, "swapped"))
    await until(lambda: before.errored or loading.done())
    assert not loading.done()
    return loading


async def test_a_canary_is_scored_beside_generations_that_fill_the_cache(one: CanaryEngine) -> None:
    """As that of an adapter: it runs alone, and what fills the cache would never end."""
    await one.engine.load_policy(one.describe("a", version=0))
    alone = await one.generate_tokens(200)
    running = [asyncio.create_task(one.generate_tokens(200)) for _ in range(4)]
    loader = one.engine._loader
    states = one.engine._instance.states
    await until(lambda: any(state.detokenizer.num_output_tokens() > 60 for state in states.values()))
    policy = one.describe("a")
    async with asyncio.timeout(120):
        await loader.canary.require(one.engine.llm, loader.instance.bounds, policy, is_fresh=False)
    for one_running in running:
        assert await one_running == alone


async def test_who_waits_for_a_lease_gets_nothing_of_a_policy_that_was_refused(one: CanaryEngine) -> None:
    one.load_in_place_again()
    await one.engine.load_policy(one.describe("a"))
    leases = Leases(600.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one.engine, "_leases", leases)
        patch.setattr(one.engine._loader, "_leases", leases)
        await leases.acquire("group")
        loading = asyncio.create_task(one.engine.load_policy(one.describe("b", canary_of="c")))
        await until(lambda: leases._drains > 0)
        waiting = asyncio.create_task(one.generate())
        await until(lambda: bool(leases._waiting))
        await leases.release("group")
        with pytest.raises(CanaryError):
            await loading
        with pytest.raises(NotServingError, match="compute different models"):
            await waiting


async def test_a_probe_that_a_fresh_load_gives_up_does_not_end_the_replica(one: CanaryEngine) -> None:
    one.load_in_place_again()
    await one.engine.load_policy(one.describe("a"))
    one.engine._has_progressed()
    await one.engine.llm.pause_generation(mode="keep", clear_cache=False)  # it gets no answer before the load
    probing = asyncio.create_task(one.engine.probe())
    await until(lambda: bool(one.engine._instance.states))
    await one.load_wrongly("b", "swapped")
    await probing


async def test_a_pause_is_ended_while_the_engine_starts(one: CanaryEngine) -> None:
    one.load_in_place_again()
    await one.engine.load_policy(one.describe("a"))
    await one.engine.pause(drain=False)
    waiting = asyncio.create_task(one.generate())
    await until(lambda: bool(one.engine._instance.states))
    loading = await begin_fresh_load(one)
    resuming = asyncio.create_task(one.engine.resume())
    with pytest.raises(NotServingError):
        await waiting
    policy = await loading
    await asyncio.wait_for(resuming, 60)
    assert not one.engine.is_paused
    assert (await one.generate())[0][0] == policy.version


async def test_a_pause_begins_while_the_engine_starts(one: CanaryEngine) -> None:
    one.load_in_place_again()
    await one.engine.load_policy(one.describe("a"))
    loading = await begin_fresh_load(one)
    pausing = asyncio.create_task(one.engine.pause(drain=False))
    policy = await loading
    await asyncio.wait_for(pausing, 60)
    assert one.engine.is_paused
    generating = asyncio.create_task(one.generate())
    await one.engine.resume()
    assert (await generating)[0][0] == policy.version


async def test_openai_routes_keep_the_models_own_sampling_after_a_fresh_load(one: CanaryEngine) -> None:
    one.load_in_place_again()
    await one.engine.load_policy(one.describe("a"))
    before = one.engine.llm.model_config.get_diff_sampling_param()
    await one.load_wrongly("b", "swapped")
    assert one.engine.llm.model_config.get_diff_sampling_param() == before
    routes = OpenAiRoutes(one.engine, one.engine._loader._settings)
    body = json.dumps({"model": one.models["a"].name, "prompt": [20, 30], "max_tokens": 4, "stream": True}).encode()
    headers = [("content-type", "application/json")]
    parts = [part async for part in routes.forward_openai("POST", "/v1/completions", headers, body)]
    assert parts[0][0] == 200, parts
    assert b"[DONE]" in b"".join(part for part in parts if isinstance(part, bytes))


async def test_fresh_loads_leave_nothing_behind(one: CanaryEngine) -> None:
    def count() -> dict[str, int]:
        gc.collect()
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "tasks": len(asyncio.all_tasks()),
        }

    one.engine._loader._loads_in_place = False
    await one.engine.load_policy(one.describe("a"))
    before = count()
    for name in ("b", "c", "a", "b"):
        await one.engine.load_policy(one.describe(name))
    assert count() == before


async def test_an_engine_that_dies_while_generations_end_does_not_wait_for_them(one: CanaryEngine) -> None:
    one.engine._loader._loads_in_place = False
    generating = asyncio.create_task(one.generate(tokens=250))
    await until(lambda: bool(one.engine._instance.states))
    policy = one.describe("c")
    loading = asyncio.create_task(one.engine.load_policy(policy))
    await until(lambda: one.engine.is_starting_again)
    one.engine._instance.kill()
    with pytest.raises(NotServingError):
        await generating
    await loading
    assert (await one.generate())[0][0] == policy.version


async def test_an_engine_that_is_ended_while_it_starts_ends_what_has_started(one: CanaryEngine) -> None:
    """The start is on a thread, which no cancellation reaches."""
    loading = await begin_fresh_load(one, "a")
    one.engine._loader.close()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert one.engine.has_died
