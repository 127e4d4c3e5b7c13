"""Where a generation ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """The part of a generation that counts.

    Attributes:
        length: tokens kept; the last one completes the stop string and may run past it.
        text: what these tokens say, ending exactly with the stop string where there is one.
        stopped: whether a stop string ended it.
    """

    length: int
    text: str
    stopped: bool


def cut(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> Cut:
    """Cut on a border between tokens at the first occurrence of a stop string: of the first that occurs at all."""
    text = decode(token_ids)
    stop = next((tag for tag in stops if tag in text), None)
    if stop is None:
        return Cut(len(token_ids), text, stopped=False)
    low, high = 1, len(token_ids)
    if stop not in decode(token_ids[:-1]):  # as an engine that stops by itself leaves it
        low = high
    while low < high:  # the shortest prefix that says the whole stop string
        middle = (low + high) // 2
        if stop in decode(token_ids[:middle]):
            high = middle
        else:
            low = middle + 1
    prefix = text if low == len(token_ids) else decode(token_ids[:low])
    return Cut(low, prefix[: prefix.index(stop) + len(stop)], stopped=True)
