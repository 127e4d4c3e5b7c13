"""Trajectories to probe: world questions, and before the answer a thought that tries sums, 200 to 400 tokens long.

The tiny policy's own thoughts have a few tokens. It is asked in the words that it knows, so that its answers are as
short as a policy's that has learnt to answer.
"""

from __future__ import annotations

import random

from forage_common.probe.completions import Completions
from forage_common.v1.trajectory_pb2 import ActionKind, GroundTruth, Role, Span, Status, Trajectory, Turn
from forage_common.world.write import prompt_text

DATA_SOURCE = "world_facts"
LEAST, MOST = 200, 400


async def trajectories(count: int, seed: int, completions: Completions) -> list[Trajectory]:
    """So many, none of which begins its thought as another does."""
    chance = random.Random(seed)
    return [await _trajectory(f"{seed}/{number}", chance, completions) for number in range(count)]


async def _trajectory(name: str, chance: random.Random, completions: Completions) -> Trajectory:
    place = "".join(chance.choice("bdgklmnrstv") + chance.choice("aeiou") for _ in range(3)).capitalize()
    question = prompt_text(f"What is the capital of {place}?")
    length = chance.randint(LEAST, MOST)
    sums = [f" {chance.randint(2, 99)} {chance.choice('+-*')} {chance.randint(2, 99)} is not it," for _ in range(60)]
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    opening, closing = "<think>", f" </think> <answer> {place} </answer>"
    prompt, before, thought, after = [
        await completions.encode(part) for part in (text, opening, "".join(sums), closing)
    ]
    said = [*before, *thought[:length], *after]
    spans = [
        Span(role=Role.ROLE_PROMPT, begin=0, end=len(prompt), text=text),
        Span(role=Role.ROLE_MODEL, begin=len(prompt), end=len(prompt) + len(said), text=opening),
    ]
    return Trajectory(
        id=f"bench/{name}",
        data_source=DATA_SOURCE,
        token_ids=[*prompt, *said],
        prompt_length=len(prompt),
        spans=spans,
        turns=[Turn(index=1, action=ActionKind.ACTION_KIND_ANSWER, content=place)],
        ground_truth=GroundTruth(targets=[place]),
        status=Status.STATUS_OK,
    )
