"""The end of a generation: tokens after a stop text are cut off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CutGeneration:
    """The part of a generation that is kept.

    Attributes:
        length: tokens kept; the last one completes the stop text and may reach past it.
        text: of these tokens, ending exactly with the stop text where there is one.
        stopped: a stop text ended it.
    """

    length: int
    text: str
    stopped: bool


def cut_at_stop(
    token_ids: Sequence[int], decode: Callable[[Sequence[int]], str], stops: Sequence[str]
) -> CutGeneration:
    """Cut between tokens, after the first occurrence of the first of `stops` that occurs.

    Tokens are never split or encoded again: what was sampled is what is trained on.
    """
    text = decode(token_ids)
    stop = next((tag for tag in stops if tag in text), None)
    if stop is None:
        return CutGeneration(len(token_ids), text, stopped=False)
    low, high = 1, len(token_ids)
    if stop not in decode(token_ids[:-1]):  # the usual case: the engine stopped there itself
        low = high
    while low < high:  # binary search for the shortest prefix with the whole stop text
        middle = (low + high) // 2
        if stop in decode(token_ids[:middle]):
            high = middle
        else:
            low = middle + 1
    prefix = text if low == len(token_ids) else decode(token_ids[:low])
    return CutGeneration(low, prefix[: prefix.index(stop) + len(stop)], stopped=True)
