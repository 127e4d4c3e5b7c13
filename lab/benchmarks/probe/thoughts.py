"""Trajectories to probe: a world question, a search with its passages, and a thought of 200 to 400 tokens of sums.

The tiny policy's own thoughts have only a few tokens. Questions use the words of its training, so that its answers are
as short as those of a trained policy.
"""

from __future__ import annotations

import random

from forage_probe.completions import CompletionsClient
from forage_proto.v1.trajectory_pb2 import (
    ActionKind,
    Document,
    GroundTruth,
    Role,
    Span,
    Status,
    Trajectory,
    Turn,
)
from forage_runtime.text.observation import format_passages
from forage_runtime.text.search_prompt import format_search_prompt

DATA_SOURCE = "world_facts"
MIN_TOKENS, MAX_TOKENS = 200, 400
FACTS = 8
"""Sentences of a passage, about 14 tokens each, which make it about as long as Search-R1's passages of 100 words."""


async def make_trajectories(count: int, seed: int, documents: int, completions: CompletionsClient) -> list[Trajectory]:
    """Make trajectories, each about different places.

    Args:
        documents: passages of the search; with 0 there is no search, and the thought follows the question.
    """
    rng = random.Random(seed)
    return [await _make_trajectory(f"{seed}/{number}", rng, documents, completions) for number in range(count)]


async def _make_trajectory(name: str, rng: random.Random, documents: int, completions: CompletionsClient) -> Trajectory:
    land, city = _make_name(rng), _make_name(rng)
    question = format_search_prompt(f"What is the capital of {land}?")
    parts = [(Role.ROLE_PROMPT, f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")]
    if documents:
        passages = [
            _make_document(rng, land, city),
            *(_make_document(rng, _make_name(rng)) for _ in range(1, documents)),
        ]
        parts += [
            (Role.ROLE_MODEL, f"<think> look it up </think> <search> {land} </search>"),
            (Role.ROLE_ENV, f"\n\n<information>{format_passages(passages)}</information>\n\n"),
        ]
    trajectory = Trajectory(
        id=f"bench/{name}",
        data_source=DATA_SOURCE,
        ground_truth=GroundTruth(targets=[city]),
        status=Status.STATUS_OK,
    )
    for role, text in parts:
        _append_span(trajectory, role, text, await completions.encode(text))
    sums = [f" {rng.randint(2, 99)} {rng.choice('+-*')} {rng.randint(2, 99)} is not it," for _ in range(36)]
    opening, thought, closing = [
        await completions.encode(text) for text in ("<think>", "".join(sums), f" </think> <answer> {city} </answer>")
    ]
    length = rng.randint(MIN_TOKENS, MAX_TOKENS)
    _append_span(trajectory, Role.ROLE_MODEL, "<think>", [*opening, *thought[:length], *closing])
    trajectory.turns[-1].action = ActionKind.ACTION_KIND_ANSWER
    return trajectory


def _append_span(trajectory: Trajectory, role: Role.ValueType, text: str, ids: list[int]) -> None:
    begin = len(trajectory.token_ids)
    trajectory.token_ids.extend(ids)
    trajectory.spans.append(Span(role=role, begin=begin, end=begin + len(ids), text=text))
    if role == Role.ROLE_MODEL:
        trajectory.turns.append(Turn(index=len(trajectory.turns) + 1, action=ActionKind.ACTION_KIND_SEARCH))


def _make_document(rng: random.Random, land: str, city: str = "") -> Document:
    facts = [f"The capital of {land} is {city or _make_name(rng)}."]
    facts += [f"The currency of {_make_name(rng)} is {_make_name(rng)}." for _ in range(FACTS - 1)]
    return Document(contents=f'"{land}"\n{" ".join(facts)}')


def _make_name(rng: random.Random) -> str:
    return "".join(rng.choice("bdgklmnrstv") + rng.choice("aeiou") for _ in range(3)).capitalize()
