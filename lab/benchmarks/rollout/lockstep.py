"""The batch loop of training scripts, as Search-R1's: all rows generate, all search in one call, all generate again.

As favourable as it can be: prompts are rendered beforehand, nothing is decoded and encoded again, one batched call to
the retriever a turn, one to the reward a batch, and rows that have answered cost nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from plan import DATA_SOURCE, Row

from forage_proto.v1.reward_pb2 import ScoreItem
from forage_proto.v1.trajectory_pb2 import Document, GroundTruth, Role, Span, Status
from forage_rollout.environments.environment import Observation
from forage_rollout.loop.tokens import FileTokenizer
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.clients.reward import RewardClient
from forage_runtime.text.observation import format_passages

Sample = Callable[[list[int], int], Awaitable[list[int]]]
"""A context and how many tokens to sample, exactly → these tokens."""


async def run_batches(
    rows: Sequence[Row],
    prompts: Sequence[list[int]],
    size: int,
    sample: Sample,
    retriever: RetrieverClient,
    reward: RewardClient,
    codec: FileTokenizer,
) -> float:
    """Sample all trajectories in batches of `size`. Returns tokens a second."""
    tokens, began = 0, time.perf_counter()
    for first in range(0, len(rows), size):
        chosen = slice(first, first + size)
        tokens += await run_batch(rows[chosen], prompts[chosen], sample, retriever, reward, codec)
    return tokens / (time.perf_counter() - began)


async def run_batch(
    rows: Sequence[Row],
    prompts: Sequence[list[int]],
    sample: Sample,
    retriever: RetrieverClient,
    reward: RewardClient,
    codec: FileTokenizer,
) -> int:
    """Sample and score the trajectories of one batch. Returns the number of sampled tokens."""
    contexts = [list(prompt) for prompt in prompts]
    spans = [[Span(role=Role.ROLE_PROMPT, text=codec.decode(prompt))] for prompt in prompts]
    active, turn, tokens = list(range(len(rows))), 0, 0
    while active:
        turn += 1
        sampled = await asyncio.gather(*(sample(contexts[row], rows[row].lengths[turn - 1]) for row in active))
        for row, ids in zip(active, sampled, strict=True):
            tokens += len(ids)
            contexts[row] += ids
            spans[row].append(Span(role=Role.ROLE_MODEL, text=codec.decode(ids)))
        active = [row for row in active if len(rows[row].lengths) > turn]
        if active:
            result = await retriever.search([rows[row].build_query(turn) for row in active])
            for row, documents in zip(active, result.documents, strict=True):
                text = format_observation(documents)
                contexts[row] += codec.encode(text)
                spans[row].append(Span(role=Role.ROLE_ENV, text=text))
    items = [
        ScoreItem(
            trajectory_id=row.build_query(0),
            data_source=DATA_SOURCE,
            spans=texts,
            ground_truth=GroundTruth(targets=["none"]),
            end_of_turn="<|im_end|>",
        )
        for row, texts in zip(rows, spans, strict=True)
    ]
    for scored in await reward.score(items):
        assert scored.score.status == Status.STATUS_OK, scored.score.detail
    return tokens


def format_observation(documents: Sequence[Document]) -> str:
    """Format documents as the observation that the service appends to the context."""
    return Observation.opening + format_passages(documents).strip() + Observation.closing
