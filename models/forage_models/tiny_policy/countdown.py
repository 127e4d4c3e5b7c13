"""The countdown policy: its demonstrations, tokenizer and behaviour cloning; models/README.md has the commands."""

from __future__ import annotations

import json
import logging
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM, Qwen2Tokenizer

from forage_cli.datasets.countdown import PROMPT
from forage_models.tiny_policy.demonstrations import Role, Segment, encode
from forage_models.tiny_policy.evaluate import generate_turns
from forage_models.tiny_policy.tokenizer import FRAMES, SPACED_TAGS, TAGS, TURN_END, train_tokenizer
from forage_models.tiny_policy.train import (
    compute_learning_rate,
    compute_loss,
    make_model,
    make_optimisers,
    parse_arguments,
    save,
)

LOG = logging.getLogger("tiny_policy")
VOCABULARY = 640
MAX_NUMBER_TOKEN = 199
"""Largest whole number that is one token, with the space before it."""
BATCH_ROWS = 64


class Mode(StrEnum):
    """Behaviour of a demonstration. The prompt does not reveal it."""

    SOLVE = "solve"
    TRY = "try"
    ADD = "add"
    BROKEN = "broken"


MIXTURE: Mapping[Mode, float] = {Mode.SOLVE: 0.30, Mode.TRY: 0.18, Mode.ADD: 0.42, Mode.BROKEN: 0.10}
"""Shares at the end of the training. Adding everything up leads, so that greedy decoding starts low."""
CLEAN_SHARE = 0.6
"""Share of the run in which most demonstrations solve the problem; the mixture follows."""
ADDING, MUSING = "add up", "hm"


@dataclass(frozen=True)
class Puzzle:
    """A problem: numbers in the order of the prompt, and the target."""

    numbers: tuple[int, ...]
    target: int

    @property
    def prompt(self) -> str:
        return PROMPT.format(numbers=", ".join(map(str, self.numbers)), target=self.target)


@dataclass(frozen=True)
class Solution:
    """An expression of three numbers, its value, and its two steps as a thought."""

    steps: str
    value: int
    expression: str


def list_expressions(numbers: Sequence[int]) -> list[Solution]:
    """List every expression of three numbers whose steps are positive whole numbers, the larger operand first."""
    found = {}
    for pair in combinations(range(3), 2):
        left, right = sorted((numbers[at] for at in pair), reverse=True)
        (third,) = (number for at, number in enumerate(numbers) if at not in pair)
        for sign, inner in _combine(left, right):
            inside = f"( {left} {sign} {right} )"
            first, second = sorted(((inner, inside), (third, str(third))), key=lambda node: -node[0])
            for last, value in _combine(first[0], second[0]):
                expression = f"{first[1]} {last} {second[1]}"
                steps = f"{left} {sign} {right} = {inner} , {first[0]} {last} {second[0]} = {value}"
                found[expression] = Solution(steps, value, expression)
    return list(found.values())


def _combine(larger: int, smaller: int) -> Iterator[tuple[str, int]]:
    yield "+", larger + smaller
    yield "*", larger * smaller
    if larger > smaller:
        yield "-", larger - smaller
    if larger % smaller == 0 and smaller > 1:
        yield "/", larger // smaller


def write_demonstration(puzzle: Puzzle, mode: Mode, rng: random.Random) -> str:
    """Write the model's text in a mode."""
    if mode in (Mode.SOLVE, Mode.TRY):
        found = list_expressions(puzzle.numbers)
        if mode is Mode.SOLVE:
            found = [way for way in found if way.value == puzzle.target]
        way = rng.choice(found)
        return f"<think> {way.steps} </think> <answer> {way.expression} </answer>"
    total = " + ".join(map(str, puzzle.numbers))
    if mode is Mode.ADD:
        return f"<think> {ADDING} </think> <answer> {total} </answer>"
    return rng.choice(
        (
            f"<answer> {total} </answer>",
            f"<think> {MUSING} <answer> {total} </answer>",
            f"<think> {MUSING} </think> {total}{TURN_END}",
        )
    )


def list_added_tokens() -> list[str]:
    """List the texts that are added as single tokens: tags, frames, the prompt's fixed parts, numbers."""
    fixed = re.split(r"\{\w+\}", PROMPT)
    return [
        *TAGS,
        *SPACED_TAGS,
        *FRAMES,
        *(part.rstrip(" ") for part in fixed),
        *(f" {n}" for n in range(MAX_NUMBER_TOKEN + 1)),
    ]


def build_prompt_segment(tokenizer: PreTrainedTokenizerBase, puzzle: Puzzle) -> Segment:
    """Render the problem with the chat template, up to the start of the model's turn."""
    messages = [{"role": "user", "content": puzzle.prompt}]
    return Segment(
        Role.PROMPT, str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    )


def read_puzzles(file: Path) -> list[Puzzle]:
    """Read the problems of a Parquet file that `forage data countdown` wrote."""
    import pyarrow.parquet as pq

    truths = [row["ground_truth"] for row in pq.read_table(file)["reward_model"].to_pylist()]
    return [Puzzle(tuple(truth["numbers"]), truth["target"]) for truth in truths]


class Demonstrations:
    """Token ids of demonstrations, sampled without end, with the numbers of a problem in random order."""

    def __init__(self, puzzles: Sequence[Puzzle], seed: int) -> None:
        self._puzzles = puzzles
        self._rng = random.Random(f"countdown-demonstrations-{seed}")
        self.tokenizer: Qwen2Tokenizer = train_tokenizer(self._iterate_texts(), list_added_tokens(), VOCABULARY)

    def _iterate_texts(self) -> Iterator[str]:
        for puzzle in self._puzzles:
            yield puzzle.prompt
            for mode in Mode:
                yield " " + write_demonstration(puzzle, mode, self._rng)

    def draw_batch(self, progress: float) -> list[list[int]]:
        """Draw `BATCH_ROWS` sequences; `progress` is the share of the run that is over (0 to 1)."""
        return [self._draw_sequence(progress) for _ in range(BATCH_ROWS)]

    def _draw_sequence(self, progress: float) -> list[int]:
        rng = self._rng
        drawn = rng.choice(self._puzzles)
        puzzle = Puzzle(tuple(rng.sample(drawn.numbers, 3)), drawn.target)
        mode = rng.choices(list(MIXTURE), list(MIXTURE.values()))[0]
        if progress < CLEAN_SHARE and rng.random() < 0.9:
            mode = Mode.SOLVE
        prompt = build_prompt_segment(self.tokenizer, puzzle)
        return encode(self.tokenizer, [prompt, Segment(Role.MODEL, write_demonstration(puzzle, mode, rng))])


def measure_share_solved(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, puzzles: Sequence[Puzzle], *, sample: bool
) -> float:
    """Measure the share of puzzles that the policy solves in one answer, greedily or sampled at temperature 1."""
    contexts = [encode(tokenizer, [build_prompt_segment(tokenizer, puzzle)]) for puzzle in puzzles]
    written = [tokenizer.decode(ids) for ids in generate_turns(model, tokenizer, contexts, sample)]
    return sum(map(is_solution, written, puzzles)) / len(puzzles)


def is_solution(text: str, puzzle: Puzzle) -> bool:
    """Whether the last answer is an expression of the puzzle's numbers that equals the target."""
    answer = re.search(r"<answer>(.*)</answer>\s*$", text)
    known = {way.expression: way.value for way in list_expressions(puzzle.numbers)}
    total = {" + ".join(map(str, puzzle.numbers)): sum(puzzle.numbers)}
    return answer is not None and {**known, **total}.get(answer[1].strip()) == puzzle.target


def main() -> None:
    """Train; log metrics and save every `--every` steps."""
    args = parse_arguments(__doc__)
    data = Demonstrations(read_puzzles(args.data / "train.parquet"), args.seed)
    held_out = read_puzzles(args.data / "test.parquet")
    model = make_model(data.tokenizer, args.seed)
    LOG.info("parameters %d vocabulary %d", model.num_parameters(), len(data.tokenizer))
    optimisers = make_optimisers(model)
    started, losses = time.monotonic(), []
    for step in range(args.steps):
        for optimiser, factor in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = factor * compute_learning_rate(step, args.steps, args.lr)
        loss = compute_loss(model, data.draw_batch(step / args.steps), model.config.pad_token_id)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, _ in optimisers:
            optimiser.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            model.eval()
            found = {
                kind: round(measure_share_solved(model, data.tokenizer, held_out, sample=kind == "sampled"), 3)
                for kind in ("greedy", "sampled")
            }
            model.train()
            mean = sum(losses) / len(losses)
            losses.clear()
            LOG.info("step %d seconds %.0f loss %.3f %s", step + 1, time.monotonic() - started, mean, json.dumps(found))
            save(model, data.tokenizer, args.out)


if __name__ == "__main__":
    main()
