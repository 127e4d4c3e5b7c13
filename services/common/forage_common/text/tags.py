"""The four tags of the search protocol, and the blocks between them. Linear in any text."""

from __future__ import annotations

from enum import StrEnum


class Tag(StrEnum):
    """What a pair of tags encloses."""

    THINK = "think"
    SEARCH = "search"
    INFORMATION = "information"
    ANSWER = "answer"


OPEN = {tag: f"<{tag}>" for tag in Tag}
CLOSE = {tag: f"</{tag}>" for tag in Tag}


def find_blocks(text: str, tag: Tag) -> list[str]:
    """Contents of each `<tag>…</tag>`, left to right; openers pair with the next closer, without overlap."""
    # As the pattern <tag>(.*?)</tag> would, but that one is quadratic on openers without closers.
    found = []
    position = 0
    while (begin := text.find(OPEN[tag], position)) >= 0:
        begin += len(OPEN[tag])
        end = text.find(CLOSE[tag], begin)
        if end < 0:
            break
        found.append(text[begin:end])
        position = end + len(CLOSE[tag])
    return found


def find_last_block(text: str, tag: Tag) -> str | None:
    """The last of `blocks(text, tag)`, found from the end; None where there is none."""
    opener = text.rfind(OPEN[tag], 0, max(text.rfind(CLOSE[tag]), 0))
    if opener < 0:
        return None
    # A block begins at the first opener since the closer before it; openers between belong to its content.
    before = text.rfind(CLOSE[tag], 0, opener)
    begin = text.find(OPEN[tag], before + len(CLOSE[tag]) if before >= 0 else 0) + len(OPEN[tag])
    return text[begin : text.find(CLOSE[tag], opener)]
