"""Reads the pages of the documentation: their code blocks, and the command lines in these."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PATTERNS = ("*.md", "docs/**/*.md", "cli/README.md", "libs/*/README.md", "services/*/README.md", "models/**/README.md")
EXAMPLES = "examples/**/*.md"
COMMANDS_PAGE = REPOSITORY / "docs/reference/cli.md"
"""Is generated from the commands; its blocks are synopses, and its examples are indented."""
_BLOCK = re.compile(r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```", re.M | re.S)
_FENCED = re.compile(r"^```.*?^```", re.M | re.S)
_EXAMPLE = re.compile(r"^    (forage .*)$", re.M)


@dataclass(frozen=True)
class Block:
    """A block of code of a page.

    Attributes:
        line: of the page, from 1, where the block's text begins.
        language: as after the fence; empty for command lines and for what a program prints.
        title: the file that the block is, such as my.yaml; empty where the page does not say.
    """

    page: Path
    line: int
    language: str
    title: str
    text: str


@dataclass(frozen=True)
class CommandLine:
    """A line of shell with its continuation lines.

    Attributes:
        line: of the page, from 1, where it begins.
        text: the line without its comment.
    """

    page: Path
    line: int
    text: str
    comment: str = ""


def list_pages() -> list[Path]:
    """List the pages whose blocks are meant for readers: all but the generated one of commands."""
    pages = {page for pattern in (*PATTERNS, EXAMPLES) for page in REPOSITORY.glob(pattern)}
    return sorted(pages - {COMMANDS_PAGE})


def read_blocks(page: Path, language: str | None = None) -> list[Block]:
    """Read the blocks of a page, or those of one language."""
    text = page.read_text(encoding="utf-8")
    found = [
        Block(page, text.count("\n", 0, match.start()) + 2, match["language"], match["title"] or "", match["text"])
        for match in _BLOCK.finditer(text)
    ]
    return [block for block in found if language in (None, block.language)]


def read_quoted(page: Path) -> list[str]:
    """Read the texts in backticks of a page, without its blocks."""
    return re.findall(r"`([^`\n]+)`", _FENCED.sub("", page.read_text(encoding="utf-8")))


def read_lines(block: Block) -> Iterator[CommandLine]:
    """Read a block as lines of shell; lines of a comment alone, and empty ones, are left out."""
    number, pending, begin = block.line, "", block.line
    for line in block.text.splitlines():
        begin = begin if pending else number
        pending, number = pending + line, number + 1
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        text, comment = split_comment(pending)
        pending = ""
        if text:
            yield CommandLine(block.page, begin, text, comment)


def read_examples(page: Path = COMMANDS_PAGE) -> list[CommandLine]:
    """Read the examples of the commands' own help."""
    text = page.read_text(encoding="utf-8").replace("\\|", "|")
    return [
        CommandLine(page, text.count("\n", 0, match.start()) + 1, *split_comment(match[1]))
        for match in _EXAMPLE.finditer(text)
    ]


def split_comment(line: str) -> tuple[str, str]:
    """Split a line of shell from its comment."""
    quote = ""
    for place, sign in enumerate(line):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign == "#" and (place == 0 or line[place - 1].isspace()):
            return line[:place].strip(), line[place + 1 :].strip()
    return line.strip(), ""
