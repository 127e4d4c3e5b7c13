"""A real engine whose cache is too small: it says so, a dispatcher's limit falls, and its tokens stay right."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from forage_queue.rollout.concurrency import EngineLoad, GroupLimit
from forage_rollout.engine.vllm_engine import VllmEngine
from forage_rollout.loop.generation import GenerationRequest
from forage_rollout.metrics import to_counts
from forage_runtime.settings import EngineSettings, ModelSettings, RolloutSettings, Settings

BLOCKS, BLOCK, SEQUENCES, TOKENS = 40, 32, 12, 160


async def test_evictions_are_counted_and_lower_the_limit(make_model: Callable[[int], Path]) -> None:
    given = {"num_gpu_blocks_override": BLOCKS, "block_size": BLOCK}
    sizes = EngineSettings(max_model_len=512, max_num_seqs=SEQUENCES, args=given)
    engine = VllmEngine(Settings(model=ModelSettings(path=make_model(0)), rollout=RolloutSettings(engine=sizes)))
    source = random.Random(3)

    def ask(seed: int) -> GenerationRequest:
        context = [source.randrange(20, 250) for _ in range(40)]
        return GenerationRequest(context, TOKENS, 1.0, 1.0, -1, seed, min_tokens=TOKENS)

    try:
        limit = GroupLimit(100, SEQUENCES, SEQUENCES)
        limit.look({"one": EngineLoad.from_counts(to_counts(engine.counts))}, SEQUENCES, is_full=True)
        requests = [ask(seed) for seed in range(SEQUENCES)]
        alone = await engine.generate(requests[0])
        assert engine.counts.evictions == 0
        assert engine.counts.cache_tokens == BLOCKS * BLOCK
        assert (engine.counts.cache_tokens_used, engine.counts.requests_running) == (0, 0)
        running = asyncio.gather(*map(engine.generate, requests))
        used = 0
        while not running.done():
            used = max(used, engine.counts.cache_tokens_used)
            await asyncio.sleep(0.01)
        crowded = await running
        assert 0.5 * BLOCKS * BLOCK < used <= BLOCKS * BLOCK
        assert engine.counts.evictions > 0, f"{SEQUENCES} sequences of {TOKENS + 40} tokens do not fit"
        assert crowded[0].token_ids == alone.token_ids
        assert crowded[0].logprobs == pytest.approx(alone.logprobs, abs=1e-3)
        before = limit.groups
        limit.look({"one": EngineLoad.from_counts(to_counts(engine.counts))}, SEQUENCES, is_full=True)
        assert limit.reason == "evictions"
        assert limit.groups < before
    finally:
        engine.shutdown()
