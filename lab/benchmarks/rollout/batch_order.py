"""Time to complete a batch whose searches take 0.2 to 2 s, by the order in which the engine takes waiting generations.

In one engine that schedules by priority: requests of one priority are taken as they came, which is first come first
served. So both orders meet the same engine, in the same process.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import plan
from lockstep import format_observation
from plan import Row

from forage_proto.v1.trajectory_pb2 import Document
from forage_rollout.loop.generation import rank_generation
from forage_rollout.loop.tokens import FileTokenizer

SEARCH_S = (0.2, 2.0)
LONGEST = 704
SampleRanked = Callable[[list[int], int, int], Awaitable[list[int]]]
"""A context, how many tokens to sample, and the priority → these tokens."""


@dataclass(frozen=True)
class BatchTimes:
    """Seconds until the whole batch was done, and until a group was, from the batch's start, on average."""

    batch_s: float
    group_s: float


def draw_search_s(query: str) -> float:
    """Draw how long the search takes, the same in every pass: log-uniform."""
    low, high = map(math.log, SEARCH_S)
    return math.exp(random.Random(query).uniform(low, high))


async def measure_batch(
    rows: Sequence[Row],
    prompts: Sequence[list[int]],
    sample: SampleRanked,
    codec: FileTokenizer,
    in_flight: int,
    by_priority: bool,
) -> BatchTimes:
    """Measure a batch of groups, which are begun in their order while fewer than `in_flight` trajectories run."""
    groups: dict[str, list[tuple[Row, list[int]]]] = defaultdict(list)
    for row, prompt in zip(rows, prompts, strict=True):
        groups[row.uid].append((row, prompt))
    size = len(next(iter(groups.values())))
    room, began = asyncio.Semaphore(max(1, in_flight // size)), time.perf_counter()

    async def run_group(members: list[tuple[Row, list[int]]]) -> float:
        ended = 0

        async def run_row(row: Row, prompt: list[int]) -> None:
            nonlocal ended
            context = list(prompt)
            for turn, tokens in enumerate(row.lengths, start=1):
                rank = rank_generation(len(context), ended, len(members), LONGEST) if by_priority else 0
                context += await sample(context, tokens, rank)
                if turn < len(row.lengths):
                    query = row.build_query(turn)
                    await asyncio.sleep(draw_search_s(f"{row.uid.rpartition('/')[0]}/{row.sample}/{turn}"))
                    context += codec.encode(format_observation([Document(contents=plan.build_document(query))]))
            ended += 1

        async with room:
            await asyncio.gather(*(run_row(row, prompt) for row, prompt in members))
        return time.perf_counter() - began

    times = await asyncio.gather(*map(run_group, groups.values()))
    return BatchTimes(max(times), statistics.mean(times))
