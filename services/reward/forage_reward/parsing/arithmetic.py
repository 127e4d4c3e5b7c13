"""Arithmetic written by a model: lexer, parser to a tree, exact evaluation, all of bounded time and memory.

    sum     = product { ("+" | "-") product }
    product = factor { ("*" | "/") factor }
    factor  = "-" factor | "(" sum ")" | integer

White space is space or tab. Powers, integer division, decimals, unary plus and leading zeros are errors.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH = 500
"""Characters of an expression. The limit also bounds the digits of every intermediate value."""

MAX_DEPTH = 64
"""Nesting of parentheses and minus signs."""

LIMIT = 10**308
"""Larger absolute values are an overflow, as they are for floating point."""

_TOKEN = re.compile(r"[ \t]*(?:([0-9]+)|([-+*/()]))")
_BLANKS = " \t"
_LEADING_ZERO = re.compile(r"0+[1-9]")


class ArithmeticFormError(ValueError):
    """The text is not an expression, or has no value; the message says why."""


@dataclass(frozen=True)
class Number:
    """An integer literal."""

    value: int


@dataclass(frozen=True)
class Negation:
    """A unary minus."""

    operand: Node


@dataclass(frozen=True)
class Chain:
    """Operators of one precedence, left to right: `first`, then ("+" or "-", node), or ("*" or "/", node)."""

    first: Node
    rest: tuple[tuple[str, Node], ...]


Node = Number | Negation | Chain


def evaluate(text: str) -> Fraction:
    """Evaluate an expression exactly.

    Raises:
        ArithmeticFormError: not an expression, longer or deeper than allowed, a division by zero, or an overflow.
    """
    return evaluate_tree(parse(text))


def parse(text: str) -> Node:
    """Parse an expression into a tree.

    Raises:
        ArithmeticFormError: not an expression, or longer or deeper than allowed.
    """
    if len(text) > MAX_LENGTH:
        raise ArithmeticFormError(f"the expression has {len(text)} characters, allowed are {MAX_LENGTH}")
    parser = _Parser(_tokenize(text))
    node = parser.parse_sum(0)
    if parser.next:
        raise ArithmeticFormError(f"{parser.next!r} after a complete expression")
    return node


def evaluate_tree(node: Node) -> Fraction:
    """Evaluate a tree exactly.

    Raises:
        ArithmeticFormError: a division by zero, or an overflow.
    """
    if isinstance(node, Number):
        value = Fraction(node.value)
    elif isinstance(node, Negation):
        value = -evaluate_tree(node.operand)
    else:
        value = evaluate_tree(node.first)
        for operator, operand in node.rest:
            value = _apply(operator, value, evaluate_tree(operand))
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


def _describe(character: str) -> str:
    """The character as it can be told from others: spaces that are none of arithmetic look alike."""
    is_unlike = character.isspace() and character > "\x7f"
    return f"{character!r} ({unicodedata.name(character, 'a space')})" if is_unlike else repr(character)


def _tokenize(text: str) -> list[str]:
    tokens = []
    text = text.rstrip(_BLANKS)
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ArithmeticFormError(f"{_describe(text[position:].lstrip(_BLANKS)[0])} is not part of arithmetic")
        tokens.append(match[1] or match[2])
        position = match.end()
    return tokens


class _Parser:
    """A recursive-descent parser over tokens; `next` is the next token, "" at the end."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = iter(tokens)
        self.next = next(self._tokens, "")

    def parse_sum(self, depth: int) -> Node:
        return self._parse_chain("+-", self._parse_product, depth)

    def _parse_product(self, depth: int) -> Node:
        return self._parse_chain("*/", self._parse_factor, depth)

    def _parse_chain(self, operators: str, operand: Callable[[int], Node], depth: int) -> Node:
        first = operand(depth)
        rest = []
        while self.next and self.next in operators:
            operator = self._advance()
            rest.append((operator, operand(depth)))
        return Chain(first, tuple(rest)) if rest else first

    def _parse_factor(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise ArithmeticFormError(f"nested deeper than {MAX_DEPTH}")
        token = self._advance()
        if token == "-":
            return Negation(self._parse_factor(depth + 1))
        if token == "(":
            node = self.parse_sum(depth + 1)
            if self._advance() != ")":
                raise ArithmeticFormError("a parenthesis is not closed")
            return node
        if not token.isdigit():
            raise ArithmeticFormError(f"{token!r} where a number should be" if token else "a number is missing")
        if _LEADING_ZERO.match(token):
            raise ArithmeticFormError(f"the number {token[:20]} has leading zeros")
        return Number(int(token))

    def _advance(self) -> str:
        token, self.next = self.next, next(self._tokens, "")
        return token
