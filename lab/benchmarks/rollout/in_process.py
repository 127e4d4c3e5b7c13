"""vLLM in this process, without the service: lock-step loop, ideal, and orders of a batch, on the service's settings.

`python in_process.py key=value …` makes the engine, prints `{"ready": true}`, and then answers every line on stdin,
such as `{"way": "lockstep", "prompts": 64, "samples": 8, "number": 1, "batch": 64}`, with one line:
`{"tokens_per_s": …}`; the ways `fcfs` and `priority`, see `batch_order.py`, with `{"batch_s": …, "group_s": …}`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import plan
from batch_order import SampleRanked, measure_batch
from lockstep import Sample, format_observation, run_batches
from plan import Row

from forage_proto.v1.trajectory_pb2 import Document
from forage_rollout.engine.vllm_engine import VllmEngine
from forage_rollout.loop.tokens import FileTokenizer
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.clients.reward import RewardClient
from forage_runtime.settings import Settings, load_settings

ORDERS = ("fcfs", "priority")


def make_sampler(engine: VllmEngine) -> SampleRanked:
    """Sample directly from AsyncLLM: unseeded, not decoded, with the log-probabilities that a trainer needs."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    ids = itertools.count()

    async def sample(context: list[int], tokens: int, priority: int) -> list[int]:
        parameters = SamplingParams(
            temperature=1.0,
            min_tokens=tokens,
            max_tokens=tokens,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async for output in engine.llm.generate(
            {"prompt_token_ids": context}, parameters, request_id=f"b{next(ids)}", priority=priority
        ):
            final = output
        sampled = list(final.outputs[0].token_ids)
        assert len(sampled) == tokens
        return sampled

    return sample


async def measure_ideal(
    rows: Sequence[Row], prompts: Sequence[list[int]], sample: Sample, codec: FileTokenizer, in_flight: int
) -> float:
    """Measure the same generations as independent requests, always `in_flight` of them: the engine is never idle.

    Contexts are as long as in a trajectory, and begin with its earlier turns, as the prefix cache sees them.

    Returns:
        Tokens a second, from the end of the first `in_flight` requests until none is left to begin.
    """
    requests = deque(
        request
        for _, request in sorted(
            (
                (turn, request)
                for row, prompt in zip(rows, prompts, strict=True)
                for turn, request in enumerate(_list_requests(row, prompt, codec))
            ),
            key=lambda numbered: numbered[0],
        )
    )
    done: list[tuple[float, int]] = []
    emptied = 0.0

    async def run_requests() -> None:
        nonlocal emptied
        while requests:
            context, tokens = requests.popleft()
            if not requests:
                emptied = time.perf_counter()
            await sample(context, tokens)
            done.append((time.perf_counter(), tokens))

    await asyncio.gather(*(run_requests() for _ in range(in_flight)))
    began = done[in_flight - 1][0]
    return sum(tokens for ended, tokens in done if began < ended <= emptied) / (emptied - began)


def _list_requests(row: Row, prompt: list[int], codec: FileTokenizer) -> list[tuple[list[int], int]]:
    """List (context, tokens) of every generation; prompt tokens stand in for sampled tokens."""
    context, requests = list(prompt), []
    for turn, tokens in enumerate(row.lengths, start=1):
        requests.append((list(context), tokens))
        sampled = list(itertools.islice(itertools.cycle(prompt), tokens))
        context += sampled + codec.encode(
            format_observation([Document(contents=plan.build_document(row.build_query(turn)))])
        )
    return requests


async def serve(settings: Settings) -> None:
    """Answer the lines on stdin."""
    engine = VllmEngine(settings)
    sample_ranked, codec, reward = make_sampler(engine), FileTokenizer(settings.model.path), RewardClient(settings)

    async def sample(context: list[int], tokens: int) -> list[int]:
        return await sample_ranked(context, tokens, 0)

    async with RetrieverClient.from_settings(settings) as retriever:
        print_reply({"ready": True})
        while line := await asyncio.to_thread(sys.stdin.readline):
            order: dict[str, Any] = json.loads(line)
            uids = plan.list_uids(order["prompts"], order["number"])
            rows = plan.list_rows(uids, order["samples"])
            rendered = {
                uid: (await engine.render_chat([{"role": "user", "content": plan.build_question(uid)}])).token_ids
                for uid in uids
            }
            prompts = [rendered[row.uid] for row in rows]
            if (way := order["way"]) in ORDERS:
                by_priority = way == "priority"
                times = await measure_batch(rows, prompts, sample_ranked, codec, order["batch"], by_priority)
                print_reply(asdict(times))
            elif way == "ideal":
                print_reply({"tokens_per_s": await measure_ideal(rows, prompts, sample, codec, order["batch"])})
            else:
                rate = await run_batches(rows, prompts, order["batch"], sample, retriever, reward, codec)
                print_reply({"tokens_per_s": rate})
    engine.shutdown()


def print_reply(reply: dict[str, Any]) -> None:
    print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(load_settings(overrides=sys.argv[1:])))
