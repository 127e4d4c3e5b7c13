"""Countdown equations: every rule, and equations written to break an evaluator."""

from __future__ import annotations

import ast
import json
import operator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage_reward.parsing import arithmetic
from forage_reward.parsing.arithmetic import MAX_DEPTH, MAX_LENGTH, ArithmeticFormError, evaluate, parse
from forage_reward.registry import bind_reward
from forage_reward.score import Status
from forage_reward.trajectory import GroundTruth, Role, Span, TrajectoryView

ROWS = [json.loads(line) for line in (Path(__file__).parents[2] / "data/reward/countdown.jsonl").open()]


def expand(text: str | list[Any]) -> str:
    """Expand a text, or the pieces of one: strings and [string, times]."""
    if isinstance(text, str):
        return text
    return "".join(piece if isinstance(piece, str) else piece[0] * piece[1] for piece in text)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: expand(row["text"])[-30:])
def test_an_equation_earns_its_expected_reward(row: dict[str, Any]) -> None:
    view = TrajectoryView((Span(Role.MODEL, expand(row["text"])),))
    truth = GroundTruth((), row["target"], tuple(row["numbers"]))
    score = bind_reward("countdown", row["params"], "here")(view, truth)
    assert (score.status, score.total) == (Status.OK, pytest.approx(row["want"]))
    assert len(score.detail) < 1000


def test_without_a_target_the_status_is_invalid_input() -> None:
    view = TrajectoryView((Span(Role.MODEL, "<answer>3</answer>"),))
    score = bind_reward("countdown", {}, "here")(view, GroundTruth((), None, (3,)))
    assert (score.status, score.components) == (Status.INVALID_INPUT, ())


def test_only_model_text_without_its_end_of_turn_is_scored() -> None:
    spans = (Span(Role.PROMPT, "e.g. <answer>3</answer>\nAssistant:"), Span(Role.MODEL, "hm\n<answer>3</answer></s>\n"))
    truth = GroundTruth((), 3, (3,))
    assert bind_reward("countdown", {}, "here")(TrajectoryView(spans, "</s>"), truth).total == 1.0
    silent = TrajectoryView((spans[0], Span(Role.MODEL, "3")))
    assert bind_reward("countdown", {}, "here")(silent, truth).total == 0.0


_APPLY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def evaluate_with_python(node: ast.expr) -> Fraction:
    """Evaluate an expression by Python's own grammar."""
    match node:
        case ast.Constant(value=int(value)):
            return Fraction(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -evaluate_with_python(operand)
        case ast.BinOp(left=left, op=op, right=right):
            value: Fraction = _APPLY[type(op)](evaluate_with_python(left), evaluate_with_python(right))
            return value
    raise AssertionError(ast.dump(node))


def join_parts(parts: tuple[str, str, str, str, str]) -> str:
    return "".join(parts)


expressions = st.recursive(
    st.integers(0, 10**20).map(str),
    lambda inner: (
        st.tuples(inner, st.sampled_from(["", " ", "\t"]), st.sampled_from("+-*/"), st.just(" "), inner).map(join_parts)
        | inner.map(lambda text: f"({text})")
        | inner.map(lambda text: f"-{text}")
    ),
    max_leaves=12,
)


@given(expressions)
def test_values_equal_those_of_pythons_grammar(text: str) -> None:
    try:
        want = evaluate_with_python(ast.parse(text, mode="eval").body)
    except ZeroDivisionError:
        want = None
    if want is None:
        with pytest.raises(ArithmeticFormError, match="division by zero"):
            evaluate(text)
    elif len(text) <= MAX_LENGTH:
        assert evaluate(text) == want


@given(st.text(max_size=60) | st.text(alphabet="0123456789+-*/() \t.e_xjL%,=\n\u00a0\uff11", max_size=60))
def test_any_text_has_a_value_or_an_error(text: str) -> None:
    try:
        value = evaluate(text)
    except ArithmeticFormError as error:
        reason = str(error)
    else:
        reason = f"equals {value}"
    assert 0 < len(reason) < 200


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1" * (MAX_LENGTH + 1), "characters"),
        ("(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1), "deeper"),
        ("-" * (MAX_DEPTH + 1) + "1", "deeper"),
        ("*".join(["9" * 100] * 4), "1e308"),
        ("1/0", "zero"),
        ("1/(2-2)", "zero"),
        ("9**9", "where a number should be"),
        ("9//9", "where a number should be"),
        ("", "missing"),
        ("1.5", "not part of arithmetic"),
        ("x", "not part of arithmetic"),
        ("1\u00a0+ 2", r"'\\xa0' \(NO-BREAK SPACE\) is not part of arithmetic"),
        ("1 \u2009+ 2", r"'\\u2009' \(THIN SPACE\) is not part of arithmetic"),
        ("1\n+ 2", r"'\\n' is not part of arithmetic"),
        ("1 1", "after a complete expression"),
        ("(1", "not closed"),
        ("01", "leading zeros"),
    ],
)
def test_an_invalid_expression_raises_an_error_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(ArithmeticFormError, match=reason):
        evaluate(text)


def test_the_deepest_allowed_expression_has_a_value() -> None:
    assert evaluate("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH) == 1


def test_a_long_sum_is_one_flat_node() -> None:
    node = parse("+".join(["1"] * 250))
    assert isinstance(node, arithmetic.Chain)
    assert len(node.rest) == 249
