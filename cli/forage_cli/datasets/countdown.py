"""Countdown: make a target from given numbers. Problems are generated from an equation that solves them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from forage_cli.datasets.manifest import write_manifest
from forage_runtime.errors import UserError

DATA_SOURCE = "countdown"
SIZES = range(3, 7)
"""Allowed counts of numbers in a problem."""
MAX_NUMBER = 99
PROMPT = (
    "Write an equation with the numbers {numbers} that equals {target}. "
    "Use each number exactly once, with + - * / and parentheses. "
    "Think inside <think> and </think>. Then write the left side of the equation on one line inside <answer> and "
    "</answer>, for example <answer> (1 + 2) / 3 </answer>.\n"
)
_MAX_MISSES = 200_000


@dataclass(frozen=True)
class Problem:
    """Numbers in the order of the prompt, the target, and an expression that solves it."""

    numbers: tuple[int, ...]
    target: int
    solution: str

    @property
    def text(self) -> str:
        """Short form of the question."""
        return f"{', '.join(map(str, self.numbers))} → {self.target}"

    @property
    def key(self) -> tuple[int, ...]:
        """Identity of a problem, which does not depend on the order of its numbers."""
        return (self.target, *sorted(self.numbers))


@dataclass(frozen=True)
class CountdownSummary:
    """Result of `build_countdown`: problems per split, and SHA-256 digests by file name."""

    problems: dict[str, int]
    digests: dict[str, str]


def generate_problems(
    sizes: Sequence[int], max_target: int, seed: int, max_number: int = MAX_NUMBER
) -> Iterator[Problem]:
    """Generate distinct problems without end, in an order that depends on the arguments alone.

    Args:
        sizes: counts of numbers, one of which is drawn for each problem.
        max_target: targets are 1 … max_target.
        max_number: numbers are 1 … max_number.

    Raises:
        UserError: no new problem is left.
    """
    rng = random.Random(f"countdown-{seed}-{','.join(map(str, sizes))}-{max_target}")
    seen: set[tuple[int, ...]] = set()
    misses = 0
    while True:
        problem = draw_problem(rng.choice(sizes), rng, max_number)
        if problem.target > max_target or problem.key in seen:
            misses += 1
            if misses > _MAX_MISSES:
                raise UserError(
                    f"no new problem after {len(seen)} and {_MAX_MISSES} draws: "
                    "ask for fewer, or allow more numbers or a larger --max-target or --max-number"
                )
            continue
        misses = 0
        seen.add(problem.key)
        yield problem


def draw_problem(size: int, rng: random.Random, max_number: int = MAX_NUMBER) -> Problem:
    """Draw one problem: a random expression tree over random numbers, whose every node is a positive whole number."""
    numbers = [rng.randint(1, max_number) for _ in range(size)]
    nodes = [(number, str(number)) for number in numbers]
    while len(nodes) > 1:
        left = nodes.pop(rng.randrange(len(nodes)))
        right = nodes.pop(rng.randrange(len(nodes)))
        nodes.append(_join_nodes(left, right, rng))
    rng.shuffle(numbers)
    target, solution = nodes[0]
    return Problem(tuple(numbers), target, solution.removeprefix("(").removesuffix(")"))


def build_countdown(
    out: Path, counts: dict[str, int], sizes: Sequence[int], max_target: int, seed: int, max_number: int = MAX_NUMBER
) -> CountdownSummary:
    """Write a Parquet file for each split and `manifest.json` to `out` (created if missing).

    No problem occurs twice, whatever the split. The same arguments give the same bytes.

    Args:
        counts: split → number of problems.

    Raises:
        UserError: an argument is out of range, or there are not enough distinct problems.
    """
    _check_arguments(counts, sizes, max_target, max_number)
    out.mkdir(parents=True, exist_ok=True)
    source = generate_problems(sizes, max_target, seed, max_number)
    for split, count in counts.items():
        _write_split(out / f"{split}.parquet", split, islice(source, count))
    limits = {"numbers": list(sizes), "max_target": max_target, "max_number": max_number}
    names = [f"{split}.parquet" for split in counts]
    digests = write_manifest(out, {"seed": seed, **limits, "problems": counts}, names, ("pyarrow",))
    return CountdownSummary(dict(counts), digests)


def _check_arguments(counts: dict[str, int], sizes: Sequence[int], max_target: int, max_number: int) -> None:
    for split, count in counts.items():
        if count < 1:
            raise UserError(f"--{split} is {count}: ask for at least one problem")
    for size in sizes:
        if size not in SIZES:
            raise UserError(f"--numbers holds {size}: a problem has {SIZES[0]} to {SIZES[-1]} numbers")
    if not sizes or len(set(sizes)) != len(sizes):
        raise UserError(f"--numbers is {list(sizes)}: give each size once, for instance 3,4")
    if max_target < 1:
        raise UserError(f"--max-target is {max_target}: targets begin at 1")
    if max_number < 2:
        raise UserError(f"--max-number is {max_number}: give at least 2")


Node = tuple[int, str]


def _join_nodes(left: Node, right: Node, rng: random.Random) -> Node:
    (a, one), (b, other) = left, right
    operators = ["+", "*"]
    if a > b:
        operators.append("-")
    if a % b == 0 and b > 1:  # rarely possible, so that it is drawn more often where it is
        operators += ["/"] * 3
    match rng.choice(operators):
        case "+":
            return a + b, f"({one} + {other})"
        case "*":
            return a * b, f"({one} * {other})"
        case "-":
            return a - b, f"({one} - {other})"
    return a // b, f"({one} / {other})"


def _write_split(path: Path, split: str, found: Iterator[Problem]) -> None:
    from forage_cli.datasets.question_file import NUMBER, NUMBERS, TEXT, write_question_rows

    truth = {"target": NUMBER, "numbers": NUMBERS}
    info = {"split": TEXT, "index": NUMBER, "question": TEXT, "solution": TEXT}
    rows = (_make_row(problem, split, index) for index, problem in enumerate(found))
    write_question_rows(path, rows, truth, info)


def _make_row(problem: Problem, split: str, index: int) -> dict[str, object]:
    from forage_cli.datasets.question_file import make_question_row

    prompt = PROMPT.format(numbers=", ".join(map(str, problem.numbers)), target=problem.target)
    truth = {"target": problem.target, "numbers": list(problem.numbers)}
    info = {"split": split, "index": index, "question": problem.text, "solution": problem.solution}
    return make_question_row(DATA_SOURCE, prompt, "arithmetic", truth, info)
