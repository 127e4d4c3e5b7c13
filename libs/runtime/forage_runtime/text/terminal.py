"""Texts of others in a terminal: what the policy, a passage, a service or a file says is shown, never obeyed."""

from __future__ import annotations

import io
import re
import sys

# Control characters but for line feed and tab, C1 with them; line separators; signs that are invisible, reorder what
# stands around them, or are no characters at all. Signs that join letters are left alone between letters that are not
# ASCII, where scripts and emoji need them: within ASCII they only make two words look like one.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff]"
    "|(?<![^\x00-\x7f])[\u200c\u200d]|[\u200c\u200d](?![^\x00-\x7f])"
)


def printable(text: str) -> str:
    """Replace everything that a terminal would obey, or not show, by its escape, such as `\\u001b`.

    Line feeds, tabs and letters of all scripts stay. JSON stays the same JSON. A second pass changes nothing.
    """
    return text if text.isascii() and text.isprintable() else _UNSAFE.sub(_escape, text.replace("\r\n", "\n"))


def escape_unencodable() -> None:
    """Let output escape what its encoding lacks, as `\\u2713` for a check mark where the locale is not UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def echo(text: str, err: bool = False) -> None:
    """Print a text that may hold anything, and a line feed."""
    stream = sys.stderr if err else sys.stdout
    stream.write(printable(text) + "\n")
    stream.flush()


def _escape(found: re.Match[str]) -> str:
    code = ord(found.group())
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
