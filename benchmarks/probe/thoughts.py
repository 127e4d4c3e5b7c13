"""Trajectories to probe: a world question, a search with its passages, and a thought of 200 to 400 tokens of sums.

The tiny policy's own thoughts have a few tokens. It is asked in the words that it knows, so that its answers are as
short as those of a policy that has learnt to answer.
"""

from __future__ import annotations

import random

from forage_common.clients.completions import CompletionsClient
from forage_common.text.observation import format_passages
from forage_common.text.search_prompt import format_search_prompt
from forage_common.v1.trajectory_pb2 import (
    ActionKind,
    Document,
    GroundTruth,
    Role,
    Span,
    Status,
    Trajectory,
    Turn,
)

DATA_SOURCE = "world_facts"
LEAST, MOST = 200, 400
FACTS = 8
"""Sentences of a passage, about 14 tokens each: with them it is about as long as Search-R1's passages of 100 words."""


async def trajectories(count: int, seed: int, documents: int, completions: CompletionsClient) -> list[Trajectory]:
    """So many, no two of which are about the same places.

    Args:
        documents: passages of the search; without any there is no search, and the thought follows the question.
    """
    chance = random.Random(seed)
    return [await _trajectory(f"{seed}/{number}", chance, documents, completions) for number in range(count)]


async def _trajectory(name: str, chance: random.Random, documents: int, completions: CompletionsClient) -> Trajectory:
    land, city = _name(chance), _name(chance)
    question = format_search_prompt(f"What is the capital of {land}?")
    parts = [(Role.ROLE_PROMPT, f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")]
    if documents:
        found = [_document(chance, land, city), *(_document(chance, _name(chance)) for _ in range(1, documents))]
        parts += [
            (Role.ROLE_MODEL, f"<think> look it up </think> <search> {land} </search>"),
            (Role.ROLE_ENV, f"\n\n<information>{format_passages(found)}</information>\n\n"),
        ]
    trajectory = Trajectory(
        id=f"bench/{name}",
        data_source=DATA_SOURCE,
        ground_truth=GroundTruth(targets=[city]),
        status=Status.STATUS_OK,
    )
    for role, text in parts:
        _add(trajectory, role, text, await completions.encode(text))
    sums = [f" {chance.randint(2, 99)} {chance.choice('+-*')} {chance.randint(2, 99)} is not it," for _ in range(36)]
    opening, thought, closing = [
        await completions.encode(text) for text in ("<think>", "".join(sums), f" </think> <answer> {city} </answer>")
    ]
    length = chance.randint(LEAST, MOST)
    _add(trajectory, Role.ROLE_MODEL, "<think>", [*opening, *thought[:length], *closing])
    trajectory.turns[-1].action = ActionKind.ACTION_KIND_ANSWER
    return trajectory


def _add(trajectory: Trajectory, role: Role.ValueType, text: str, ids: list[int]) -> None:
    begin = len(trajectory.token_ids)
    trajectory.token_ids.extend(ids)
    trajectory.spans.append(Span(role=role, begin=begin, end=begin + len(ids), text=text))
    if role == Role.ROLE_MODEL:
        trajectory.turns.append(Turn(index=len(trajectory.turns) + 1, action=ActionKind.ACTION_KIND_SEARCH))


def _document(chance: random.Random, land: str, city: str = "") -> Document:
    facts = [f"The capital of {land} is {city or _name(chance)}."]
    facts += [f"The currency of {_name(chance)} is {_name(chance)}." for _ in range(FACTS - 1)]
    return Document(contents=f'"{land}"\n{" ".join(facts)}')


def _name(chance: random.Random) -> str:
    return "".join(chance.choice("bdgklmnrstv") + chance.choice("aeiou") for _ in range(3)).capitalize()
