"""Numbers as models write them become those that math-verify reads; what is no such number stays as it is."""

from __future__ import annotations

import unicodedata
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage_reward.parsing.math_text import rewrite_numbers


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("−5", "-5"),
        ("x – 1", "x - 1"),
        ("½", r"\frac{1}{2}"),
        ("1½", r"1\frac{1}{2}"),
        ("1 ½", r"1\frac{1}{2}"),
        ("10⁻³", "10^{-3}"),
        ("x²³", "x^{23}"),
        ("√2", r"\sqrt{2}"),
        ("√(x+1)", r"\sqrt{(x+1)}"),
        ("1\u00a0234\u00a0567", "1234567"),
        ("1’234.5", "1234.5"),
        (r"12\,345", "12345"),
        ("٣٤", "34"),
        ("6÷3", "6/3"),
        ("10 %", "10"),
        ("5.", "5"),
        ("x = 5. ", "x = 5"),
        ("(1, 2);", "(1, 2)"),
        ("5。", "5"),
        ("10%.", "10"),
        ("90°", "90"),
        ("−5 °C", "-5"),
        ("45º", "45"),
        ("5€", "5"),
        ("€1.5", "1.5"),
        ("5 £", "5"),
        ("3\u00a0+\u20094", "3 + 4"),
        ("\ufeff5\u200b", "5"),
        ("＋３．５", "+3.5"),
        ("x＝5", "x=5"),
        ("2✕3", "2\\cdot 3"),
        ("10^-3", "10^{-3}"),
        ("2^10", "2^{10}"),
        ("1.5e-3", "1.5 \\cdot 10^{-3}"),
        ("**5**", "5"),
        ("`5`", "5"),
    ],
)
def test_numbers_of_models(text: str, want: str) -> None:
    assert rewrite_numbers(text, "number") == want


@pytest.mark.parametrize(
    "text",
    [
        *("1,234", "(1,234)", "1 2 3", "1 23", "1234 567 890", "12 3456", "f'(x)", "x\\%y", r"\frac12", "1.234 567"),
        *("5!", "0.333...", "2e", "2e3x", "x^{2}", "a**b", "1.5", ".5", "12:30"),
    ],
)
def test_what_is_no_such_number_is_kept(text: str) -> None:
    assert rewrite_numbers(text, "number") == text


@given(st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters="%\\'^`*.,;:eE"), max_size=40))
def test_plain_text_without_groups_is_kept(joined: str) -> None:
    assert rewrite_numbers(joined, "fraction") == joined


def test_every_vulgar_fraction_has_its_value() -> None:
    for character in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞↉":
        numerator, denominator = rewrite_numbers(character, "number")[6:-1].split("}{")
        value = Fraction(int(numerator), int(denominator))
        assert float(value) == pytest.approx(unicodedata.numeric(character), abs=1e-7)


def test_a_percentage_is_a_fraction_where_the_route_says_so() -> None:
    assert rewrite_numbers(r"12.5\%", "fraction") == r"\frac{12.5}{100}"
    assert rewrite_numbers("50 % or .5%", "fraction") == r"\frac{50}{100} or \frac{.5}{100}"
