"""What others wrote reaches a terminal or a log as text only."""

from __future__ import annotations

import io
import json
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from forage_runtime.text.console import TextConsole
from forage_runtime.text.terminal import echo, escape_unencodable, printable

HOSTILE = [
    "\x1b[2J\x1b[H",  # clear the screen
    "\x1b]0;title\x07",  # name the window
    "\x1b]52;c;cm0gLXJmIC8=\x07",  # write to the clipboard
    "\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "\x1bP+q\x1b\\",
    "\x9b31m",
    "\x9d0;x\x9c",
    "right\rwrong",
    "wrong\x08\x08\x08\x08\x08right",
    "\x07\x00\x0b\x0c\x7f\x85",
    "\u202egnp.exe",
    "\u2066a\u2069\u061c\u200e\u200f",
    "<ans\u200bwer>\u2060\ufeff<ans\u200dwer>",
    "\u2028\u2029",
    "\U000e0041\U000e007f",
    "\ud800 \udfff",
]
_ALLOWED = {"\n", "\t", "\u200c", "\u200d"}


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    shown = printable(f"before {text} after")
    assert all(unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in shown)
    assert shown.startswith("before ")
    assert shown.endswith(" after")
    assert "\\u" in shown


@given(st.text(st.characters(exclude_categories=())))
def test_every_text_is_printable_once_and_for_all(text: str) -> None:
    shown = printable(text)
    assert printable(shown) == shown
    left = {c for c in shown if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")}
    assert left <= _ALLOWED
    shown.encode()


@pytest.mark.parametrize(
    "text", ["日本語 ქართული عربي", "سلام\u200cها", "👨\u200d👩\u200d👧", "क्\u200dष", "é à — ▁Ġ", "a\n\tb"]
)
def test_letters_of_all_scripts_stay(text: str) -> None:
    assert printable(text) == text


def test_json_stays_the_same_json() -> None:
    value = {"text": "".join(HOSTILE[:-1])}
    assert json.loads(printable(json.dumps(value, ensure_ascii=False))) == value


@pytest.mark.parametrize(
    "text", [*HOSTILE, "[/x]", "[bold]loud[/bold]", "[link=http://evil.example]x[/link]", ":smile:"]
)
def test_a_console_prints_texts_of_others_as_they_are(text: str) -> None:
    file = io.StringIO()
    console = TextConsole(file=file, force_terminal=True, color_system=None, width=200, highlight=False)
    table = Table(text, title=text)
    table.add_row(text)
    for part in (text, Text(text), Panel(Text(text), title=Text(text)), table):
        console.print(part)
    output = file.getvalue()
    output.encode()
    # Bold of the table's header is the only sequence of the console's own.
    own = output.replace("\x1b[1m", "").replace("\x1b[3m", "").replace("\x1b[0m", "")
    assert not {c for c in own if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n"}
    if text.isprintable():
        assert output.count(text) >= 4


def test_echo_prints_what_no_encoding_has(capsys: pytest.CaptureFixture[str]) -> None:
    echo("a\ud800\x1b[2J")
    assert capsys.readouterr().out == "a\\ud800\\u001b[2J\n"


def test_output_escapes_what_its_encoding_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    escape_unencodable()
    echo("✓ 富士山")
    assert written.getvalue() == b"\\u2713 \\u5bcc\\u58eb\\u5c71\n"
