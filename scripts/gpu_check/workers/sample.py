"""Samples from the rollout service's engine in this process, twice, around a pause.

`python sample.py TOKENS key=value …` prints, for each prompt, context, tokens and log-probabilities of both passes, the
prompt tokens that the second pass found in the cache, and tokens a second.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from forage_rollout.engine.vllm_engine import VllmEngine
from forage_rollout.loop.generation import Generation, GenerationRequest
from forage_runtime.settings import load_settings

PROMPTS = 32
QUESTION = (
    f"{'Answer the question, and search as often as you want. ' * 4}What is the capital of the country number %d?"
)


async def main(tokens: int, overrides: list[str]) -> None:
    engine = VllmEngine(load_settings(overrides=overrides, environ={}))
    contexts = [
        (await engine.render_chat([{"role": "user", "content": QUESTION % n}])).token_ids for n in range(PROMPTS)
    ]

    async def sample(seed: int) -> list[Generation]:
        requests = [GenerationRequest(context, tokens, 1.0, 1.0, -1, seed + n) for n, context in enumerate(contexts)]
        return list(await asyncio.gather(*map(engine.generate, requests)))

    await sample(10_000)  # warm: kernels are compiled, graphs captured
    began = time.perf_counter()
    first = await sample(0)
    seconds = time.perf_counter() - began
    before = engine.counts.cached_prompt_tokens
    running = asyncio.create_task(sample(0))
    await engine.pause(drain=False)
    await engine.resume()
    second = await running
    rows: list[dict[str, Any]] = [
        {"context": context, "first": [one.token_ids, one.logprobs], "second": [two.token_ids, two.logprobs]}
        for context, one, two in zip(contexts, first, second, strict=True)
    ]
    reply = {
        "rows": rows,
        "dtype": engine.dtype,
        "cached_tokens": engine.counts.cached_prompt_tokens - before,
        "tokens_per_s": sum(len(one.token_ids) for one in first) / seconds,
    }
    engine.shutdown()
    print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))
