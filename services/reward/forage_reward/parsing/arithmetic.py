"""Arithmetic that a model wrote: lexer, parser to a tree, exact evaluation. Nothing in it can hang or grow large.

    sum     = product { ("+" | "-") product }
    product = factor { ("*" | "/") factor }
    factor  = "-" factor | "(" sum ")" | integer

Blank is space or tab. There are no powers, no integer division, no decimals, no unary plus, and no leading zeros.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH = 500
"""Characters of an expression. It bounds the digits of every number that can come up."""

MAX_DEPTH = 64
"""Parentheses and minus signs within each other."""

LIMIT = 10**308
"""Values beyond it are an overflow, as they are for floating point."""

_TOKEN = re.compile(r"[ \t]*(?:([0-9]+)|([-+*/()]))")
_LEADING_ZERO = re.compile(r"0+[1-9]")


class ArithmeticFormError(ValueError):
    """The text is no expression, or one without a value; the message says why."""


@dataclass(frozen=True)
class Number:
    """An integer literal."""

    value: int


@dataclass(frozen=True)
class Negated:
    """A unary minus."""

    of: Node


@dataclass(frozen=True)
class Chain:
    """Operators of one rank, left to right: `first`, then ("+", node), ("-", node) or ("*", node), ("/", node)."""

    first: Node
    rest: tuple[tuple[str, Node], ...]


Node = Number | Negated | Chain


def evaluate(text: str) -> Fraction:
    """The exact value of an expression.

    Raises:
        ArithmeticFormError: not an expression, longer or deeper than allowed, a division by zero, or an overflow.
    """
    return value_of(parse(text))


def parse(text: str) -> Node:
    """The tree of an expression.

    Raises:
        ArithmeticFormError: not an expression, or longer or deeper than allowed.
    """
    if len(text) > MAX_LENGTH:
        raise ArithmeticFormError(f"the expression has {len(text)} characters, allowed are {MAX_LENGTH}")
    parser = _Parser(_tokens(text))
    node = parser.sum(0)
    if parser.next:
        raise ArithmeticFormError(f"{parser.next!r} after a complete expression")
    return node


def value_of(node: Node) -> Fraction:
    """The exact value of a tree.

    Raises:
        ArithmeticFormError: a division by zero, or an overflow.
    """
    if isinstance(node, Number):
        value = Fraction(node.value)
    elif isinstance(node, Negated):
        value = -value_of(node.of)
    else:
        value = value_of(node.first)
        for operator, operand in node.rest:
            value = _apply(operator, value, value_of(operand))
    if abs(value) > LIMIT:
        raise ArithmeticFormError("a value beyond 1e308")
    return value


def _apply(operator: str, left: Fraction, right: Fraction) -> Fraction:
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
    if not right:
        raise ArithmeticFormError("a division by zero")
    return left / right


def _tokens(text: str) -> list[str]:
    tokens = []
    text = text.rstrip(" \t")
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise ArithmeticFormError(f"{text[position:].lstrip()[:1]!r} is not part of arithmetic")
        tokens.append(found[1] or found[2])
        position = found.end()
    return tokens


class _Parser:
    """Recursive descent over tokens; `next` is the token to come, "" at the end."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = iter(tokens)
        self.next = next(self._tokens, "")

    def sum(self, depth: int) -> Node:
        return self._chain("+-", self._product, depth)

    def _product(self, depth: int) -> Node:
        return self._chain("*/", self._factor, depth)

    def _chain(self, operators: str, operand: Callable[[int], Node], depth: int) -> Node:
        first = operand(depth)
        rest = []
        while self.next and self.next in operators:
            operator = self._take()
            rest.append((operator, operand(depth)))
        return Chain(first, tuple(rest)) if rest else first

    def _factor(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise ArithmeticFormError(f"nested deeper than {MAX_DEPTH}")
        token = self._take()
        if token == "-":
            return Negated(self._factor(depth + 1))
        if token == "(":
            node = self.sum(depth + 1)
            if self._take() != ")":
                raise ArithmeticFormError("a parenthesis is not closed")
            return node
        if not token.isdigit():
            raise ArithmeticFormError(f"{token!r} where a number should be" if token else "a number is missing")
        if _LEADING_ZERO.match(token):
            raise ArithmeticFormError(f"the number {token[:20]} has leading zeros")
        return Number(int(token))

    def _take(self) -> str:
        token, self.next = self.next, next(self._tokens, "")
        return token
