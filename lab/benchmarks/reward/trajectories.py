"""Deterministic trajectories of 2 to 4 kB: one to three searches, passages, right and wrong answers."""

from __future__ import annotations

import random
from dataclasses import dataclass

from forage_proto.v1 import reward_pb2, trajectory_pb2

ROLES = {
    "prompt": trajectory_pb2.ROLE_PROMPT,
    "model": trajectory_pb2.ROLE_MODEL,
    "env": trajectory_pb2.ROLE_ENV,
}
PROMPT = (
    "<|im_start|>user\nAnswer the given question. Think between <think> and </think>. Call a search engine by <search> "
    "query </search>; results come between <information> and </information>. Answer between <answer> and </answer>, "
    "for example, <answer> Beijing </answer>. Question: {question}?<|im_end|>\n<|im_start|>assistant\n"
)
BYTES = (2000, 4000)


@dataclass(frozen=True)
class Example:
    """A trajectory in the form of a training script: texts by author, and accepted answers."""

    spans: tuple[tuple[str, str], ...]
    targets: tuple[str, ...]


def make_examples(count: int, seed: int = 0) -> list[Example]:
    """Make examples that depend on the seed alone, each between 2 and 4 kB."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("etaoinshrdlucmfwypvbgk", k=rng.randint(2, 9))) for _ in range(3000)]

    def make_text(characters: int) -> str:
        result = ""
        while len(result) < characters:
            result += rng.choice(words) + rng.choice((" ", " ", " ", ", ", ". The "))
        return result[:characters].strip()

    def make_example() -> Example:
        target = make_text(rng.randint(5, 25))
        answer = target if rng.random() < 0.4 else make_text(rng.randint(5, 25))
        spans = [("prompt", PROMPT.format(question=make_text(70)))]
        searches = rng.randint(1, 3)
        for turn in range(searches):
            spans.append(
                ("model", f"<think>{make_text(rng.randint(60, 200))}</think>\n<search>{make_text(30)}</search>")
            )
            evidence = target if turn == 0 and rng.random() < 0.5 else make_text(15)
            passages = f"Doc 1(Title: {make_text(20)}) {make_text(1000 // searches)} {evidence}. "
            passages += f"Doc 2(Title: {make_text(20)}) "
            spans.append(("env", f"\n\n<information>{passages}{make_text(700 // searches)}</information>\n\n"))
        close = "</answer>" if rng.random() < 0.9 else ""
        spans.append(("model", f"<think>{make_text(rng.randint(60, 200))}</think>\n<answer>{answer}{close}<|im_end|>"))
        return Example(tuple(spans), (target, make_text(12)))

    examples: list[Example] = []
    while len(examples) < count:
        example = make_example()
        if BYTES[0] <= sum(len(part) for _, part in example.spans) <= BYTES[1]:
            examples.append(example)
    return examples


def build_item(number: int, example: Example) -> reward_pb2.ScoreItem:
    """Build the item that the rollout service would send."""
    return reward_pb2.ScoreItem(
        trajectory_id=f"bench/nq/train/{number}/0",
        data_source="nq",
        spans=[trajectory_pb2.Span(role=ROLES[role], text=text) for role, text in example.spans],
        ground_truth=trajectory_pb2.GroundTruth(targets=example.targets),
        end_of_turn="<|im_end|>",
    )
