"""The four tags of the search protocol, and the blocks between them; linear time for any text."""

from __future__ import annotations

from enum import StrEnum


class Tag(StrEnum):
    """Kinds of blocks."""

    THINK = "think"
    SEARCH = "search"
    INFORMATION = "information"
    ANSWER = "answer"


OPEN = {tag: f"<{tag}>" for tag in Tag}
CLOSE = {tag: f"</{tag}>" for tag in Tag}


def find_blocks(text: str, tag: Tag) -> list[str]:
    """Find the contents of `<tag>…</tag>`, left to right, without overlap; an opener pairs with the next closer."""
    # The pattern <tag>(.*?)</tag> finds the same, but in quadratic time for openers without closers.
    contents = []
    position = 0
    while (begin := text.find(OPEN[tag], position)) >= 0:
        begin += len(OPEN[tag])
        end = text.find(CLOSE[tag], begin)
        if end < 0:
            break
        contents.append(text[begin:end])
        position = end + len(CLOSE[tag])
    return contents


def find_last_block(text: str, tag: Tag) -> str | None:
    """Find the last of `find_blocks(text, tag)`, searching from the end; None if there is none."""
    opener = text.rfind(OPEN[tag], 0, max(text.rfind(CLOSE[tag]), 0))
    if opener < 0:
        return None
    # A block begins at the first opener since the closer before it; openers between belong to its content.
    before = text.rfind(CLOSE[tag], 0, opener)
    begin = text.find(OPEN[tag], before + len(CLOSE[tag]) if before >= 0 else 0) + len(OPEN[tag])
    return text[begin : text.find(CLOSE[tag], opener)]
