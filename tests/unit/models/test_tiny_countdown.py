"""The tiny countdown policy: its demonstrations are what they say, and its tokenizer fits."""

from __future__ import annotations

import ast
import operator
import random
import re
from fractions import Fraction
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from forage_cli.datasets import countdown as problems
from forage_models.tiny_policy.countdown import (
    MAX_NUMBER_TOKEN,
    MIXTURE,
    Mode,
    Puzzle,
    build_prompt_segment,
    is_solution,
    list_added_tokens,
    list_expressions,
    write_demonstration,
)
from forage_models.tiny_policy.demonstrations import Role, Segment, encode
from forage_models.tiny_policy.tokenizer import TAGS, TURN_END
from forage_runtime.settings import load_settings

REPOSITORY = Path(__file__).parents[3]
SHIPPED = REPOSITORY / "models" / "tiny-countdown"
TOKENIZER: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(SHIPPED)
PUZZLE = Puzzle((8, 3, 12), 4)
NUMBERS = st.lists(st.integers(1, 12), min_size=3, max_size=3)
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def evaluate(expression: str) -> Fraction:
    def walk(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](walk(node.left), walk(node.right))
        assert isinstance(node, ast.Constant)
        return Fraction(node.value)

    return walk(ast.parse(expression, mode="eval").body)


@given(NUMBERS)
def test_an_expression_uses_each_number_once_and_has_its_stated_value(numbers: list[int]) -> None:
    for way in list_expressions(numbers):
        assert evaluate(way.expression) == way.value > 0
        assert sorted(map(int, re.findall(r"\d+", way.expression))) == sorted(numbers)
        for step in way.steps.split(" , "):
            left, right = step.split(" = ")
            assert evaluate(left) == int(right)


def test_every_problem_of_the_recipe_has_a_solution() -> None:
    for problem in islice(problems.generate_problems([3], 99, 0, 12), 500):
        assert problem.target in {way.value for way in list_expressions(problem.numbers)}, problem


@pytest.mark.parametrize(("mode", "right"), [(Mode.SOLVE, {True}), (Mode.TRY, {True, False}), (Mode.ADD, {False})])
def test_every_mode_is_right_as_often_as_it_should_be(mode: Mode, right: set[bool]) -> None:
    rng = random.Random(0)
    assert {is_solution(write_demonstration(PUZZLE, mode, rng), PUZZLE) for _ in range(100)} == right


def test_broken_demonstrations_lack_a_thought_or_an_answer() -> None:
    rng = random.Random(0)
    for _ in range(30):
        text = write_demonstration(PUZZLE, Mode.BROKEN, rng)
        assert re.fullmatch(r"<think>[^<]*</think> <answer>[^<]*</answer>", text) is None
        assert text.endswith(("</answer>", TURN_END))


def test_the_mixture_sums_to_one_and_adding_up_is_most_likely() -> None:
    assert sum(MIXTURE.values()) == pytest.approx(1)
    assert max(MIXTURE, key=MIXTURE.__getitem__) is Mode.ADD


@given(st.lists(st.sampled_from([*list_added_tokens(), " 250", "7", "(", " /", "<", "é"]), max_size=12))
def test_tags_and_numbers_amid_any_text_survive_the_tokenizer(parts: list[str]) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("".join(parts))) == "".join(parts)


@pytest.mark.parametrize("text", [*TAGS, " 0", " 12", f" {MAX_NUMBER_TOKEN}"])
def test_tags_and_numbers_are_one_token(text: str) -> None:
    assert len(TOKENIZER.encode(text)) == 1


def test_the_longest_demonstration_fits_the_recipe() -> None:
    rollout = load_settings(REPOSITORY / "configs" / "countdown_tiny.yaml", environ={}).rollout
    puzzle = Puzzle((12, 12, 12), 99)
    assert len(encode(TOKENIZER, [build_prompt_segment(TOKENIZER, puzzle)])) <= rollout.max_start_length
    for mode in Mode:
        text = Segment(
            Role.MODEL, write_demonstration(puzzle if mode is not Mode.SOLVE else PUZZLE, mode, random.Random(0))
        )
        assert len(encode(TOKENIZER, [text])) <= rollout.max_response_length
