"""Numbers as models write them, rewritten as the LaTeX that math-verify reads.

math-verify 0.9 reads "1½" as 1, "10⁻³" as 10, and "−5" with the minus U+2212 not at all.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

Percent = Literal["number", "fraction"]
"""What `10%` is equal to: 10, as in the answers of MATH and GSM8K, or 0.1."""


def _list_replacements() -> dict[int, str]:
    """Character → LaTeX, for what math-verify does not know."""
    found = dict.fromkeys(map(ord, "−–‐‑－﹣"), "-")
    found |= dict.fromkeys(map(ord, "×⋅·∙"), "\\cdot ") | dict.fromkeys(map(ord, "÷∕⁄／"), "/")
    found |= dict.fromkeys(map(ord, "％﹪"), "\\%") | {ord("π"): "\\pi ", ord("∞"): "\\infty "}
    return found


_REPLACEMENTS = _list_replacements()
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_SUPERSCRIPT = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_VULGAR = re.compile("[\\s\u2064]*([¼-¾⅐-⅞↉])")
_ROOT = re.compile(r"√\s*(\d+(?:\.\d+)?|\w|\([^()]*\))")
# A comma between thousands is math-verify's own: it knows (1,234) as a pair and {1,234} as a set.
_THOUSANDS = re.compile(r"(?<![\d.,'’])(?<!\d\s)\d{1,3}(?:(?:['’]|\\[,!:]|[ \u00a0\u2009\u202f])\d{3})+(?!['’]?\d)")
_PERCENT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*\\?%")


def rewrite_numbers(text: str, percent: Percent) -> str:
    """Rewrite an expression so that math-verify reads the numbers that a person reads; the rest stays as it is."""
    text = "".join(character if character < "\x80" else _write_digit(character) for character in text)
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _VULGAR.sub(lambda match: _write_fraction(match[1]), text)
    text = _ROOT.sub(lambda match: f"\\sqrt{{{match[1]}}}", text)
    text = _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), text).translate(_REPLACEMENTS)
    number = r"\1" if percent == "number" else r"\\frac{\1}{100}"
    return _PERCENT.sub(number, text)


def _write_digit(character: str) -> str:
    """The ASCII digit for a decimal digit of another script: "٢" and "２" are 2."""
    return character if unicodedata.category(character) != "Nd" else str(unicodedata.decimal(character))


def _write_fraction(character: str) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", character).partition("\u2044")
    return f"\\frac{{{numerator}}}{{{denominator}}}"
