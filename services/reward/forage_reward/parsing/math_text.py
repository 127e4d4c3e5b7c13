"""Numbers as models write them, rewritten as the LaTeX that math-verify reads.

math-verify 0.9 reads "1½" as 1, "10⁻³" as 10, and "−5" with the minus U+2212 not at all. As LaTeX, which is how answers
are read, it knows neither "5.", "90°" and "5€" nor spaces other than the plain one, and of "10^-3" it takes the 10.
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
    found |= dict.fromkeys(map(ord, "×⋅·∙✕✖⨯"), "\\cdot ") | dict.fromkeys(map(ord, "÷∕⁄／"), "/")
    found |= dict.fromkeys(map(ord, "％﹪"), "\\%") | {ord("π"): "\\pi ", ord("∞"): "\\infty "}
    # No full-width brace or backslash: it could close what the answer is put into.
    return found | {ord(wide): chr(ord(wide) - 0xFEE0) for wide in "＋＝．，：；（）［］＜＞"}


_REPLACEMENTS = _list_replacements()
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_SUPERSCRIPT = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_VULGAR = re.compile("\\s*([¼-¾⅐-⅞↉])")
_ROOT = re.compile(r"√\s*(\d+(?:\.\d+)?|\w|\([^()]*\))")
# A comma between thousands is math-verify's own: it knows (1,234) as a pair and {1,234} as a set.
_THOUSANDS = re.compile(r"(?<![\d.,'’])(?<!\d\s)\d{1,3}(?:(?:['’]|\\[,!:]| )\d{3})+(?!['’]?\d)")
_POWER = re.compile(r"\^\s*([+-]?\d+)")
_SCIENTIFIC = re.compile(r"(?<=\d)[eE]([+-]?\d+)(?![\w.])")
_DEGREE = re.compile(r"(?<=\d)\s*[°º˚]\s*[CF]?(?!\w)")
_END = re.compile(r"(?<![.\s])\s*[.,;:。]\s*\Z")
"""The end of a sentence; "..." is something else."""
_MARKUP = ("**", "`")
_PERCENT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*\\?%")


def rewrite_numbers(text: str, percent: Percent) -> str:
    """Rewrite an expression so that math-verify reads the numbers that a person reads; the rest stays as it is."""
    text = "".join(character if character < "\x80" else _write_character(character) for character in text)
    text = _strip_markup(text)
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _VULGAR.sub(lambda match: _write_fraction(match[1]), text)
    text = _ROOT.sub(lambda match: f"\\sqrt{{{match[1]}}}", text)
    text = _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), text).translate(_REPLACEMENTS)
    text = _END.sub("", _DEGREE.sub("", text))
    text = _POWER.sub(r"^{\1}", _SCIENTIFIC.sub(r" \\cdot 10^{\1}", text))
    number = r"\1" if percent == "number" else r"\\frac{\1}{100}"
    return _PERCENT.sub(number, text)


def _write_character(character: str) -> str:
    """ASCII for a decimal digit of another script ("٢" and "２" are 2) and for a space; "" for what has no value: signs
    of currencies and characters of no width."""
    match unicodedata.category(character):
        case "Nd":
            return str(unicodedata.decimal(character))
        case "Zs":
            return " "
        case "Sc" | "Cf":
            return ""
    return character


def _strip_markup(text: str) -> str:
    """Without the marks of bold text or code around the whole."""
    text = text.strip()
    for mark in _MARKUP:
        if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
            text = text.removeprefix(mark).removesuffix(mark).strip()
    return text


def _write_fraction(character: str) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", character).partition("\u2044")
    return f"\\frac{{{numerator}}}{{{denominator}}}"
