"""Hugging Face's `generate` in the same loop: one padded batch, which lasts as long as its longest row.

`python hf_generate.py PROMPTS SAMPLES BATCH key=value …` prints one line: `{"tokens_per_s": …}`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

import plan
import torch
from lockstep import run_batches
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList

from forage_rollout.loop.tokens import FileTokenizer
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.clients.reward import RewardClient
from forage_runtime.settings import Settings, load_settings


class ByPlan(StoppingCriteria):
    """A row ends when it has its tokens."""

    def __init__(self, begin: int, lengths: Sequence[int]) -> None:
        self._ends = begin + torch.tensor(lengths)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return self._ends <= input_ids.shape[1]


class Batcher:
    """Gives the requests of one turn, which all come together, to one call of `generate`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._waiting: list[tuple[list[int], int, asyncio.Future[list[int]]]] = []

    async def sample(self, context: list[int], tokens: int) -> list[int]:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((context, tokens, future))
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._generate)  # after all that were started together
        return await future

    @torch.inference_mode()
    def _generate(self) -> None:
        waiting, self._waiting = self._waiting, []
        width = max(len(context) for context, _, _ in waiting)
        ids = torch.zeros(len(waiting), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (context, _, _) in enumerate(waiting):
            ids[row, width - len(context) :] = torch.tensor(context)
            mask[row, width - len(context) :] = 1
        lengths = [tokens for _, tokens, _ in waiting]
        sampled = self._model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=max(lengths),
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([ByPlan(width, lengths)]),
        )
        for row, (_, tokens, future) in enumerate(waiting):
            future.set_result(sampled[row, width : width + tokens].tolist())


async def main(prompts: int, samples: int, batch: int, settings: Settings) -> None:
    model = AutoModelForCausalLM.from_pretrained(settings.model.path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # only the plan ends a row
    tokenizer, codec = AutoTokenizer.from_pretrained(settings.model.path), FileTokenizer(settings.model.path)
    reward, batcher = RewardClient(settings), Batcher(model)
    rows = plan.list_rows(plan.list_uids(prompts, 0), samples)
    rendered = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": plan.build_question(row.uid)}], add_generation_prompt=True, return_dict=False
        )
        for row in rows
    ]
    async with RetrieverClient.from_settings(settings) as retriever:
        await batcher.sample(rendered[0], 4)  # warm
        rate = await run_batches(rows, rendered, batch, batcher.sample, retriever, reward, codec)
    print(json.dumps({"tokens_per_s": rate}))


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:4]), load_settings(overrides=sys.argv[4:])))
