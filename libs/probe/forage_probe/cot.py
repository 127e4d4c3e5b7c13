"""The place of the chain of thought in a generation, and the lengths of its truncations."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from forage_proto.v1.probe_pb2 import CotBoundary
from forage_runtime.text.tags import CLOSE, OPEN, Tag


@dataclass(frozen=True)
class Cot:
    """Tokens [begin, end) of a generation, and the tag that ended them."""

    begin: int
    end: int
    boundary: CotBoundary.ValueType

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.end - self.begin


def find_cot(texts: Sequence[str]) -> Cot:
    """Find the chain of thought of a generation, given the text of each of its tokens.

    From after the first `<think>`, or the start, to the first `</think>`; without one to the first `<answer>`; without
    either to the end. If it would end before it begins, it is empty. A token with any part of a tag, for instance one
    that merges a tag with its neighbours, belongs to the tag.
    """
    text = "".join(texts)
    ends = list(accumulate(map(len, texts)))
    think_open, think_close, answer_open = (
        text.find(tag) for tag in (OPEN[Tag.THINK], CLOSE[Tag.THINK], OPEN[Tag.ANSWER])
    )
    # Tokens that begin after the tag; and tokens that end before it.
    begin = bisect_left([0, *ends[:-1]], think_open + len(OPEN[Tag.THINK])) if think_open >= 0 else 0
    if think_close >= 0:
        end, boundary = bisect_right(ends, think_close), CotBoundary.COT_BOUNDARY_THINK_CLOSE
    elif answer_open >= 0:
        end, boundary = bisect_right(ends, answer_open), CotBoundary.COT_BOUNDARY_ANSWER_OPEN
    else:
        end, boundary = len(texts), CotBoundary.COT_BOUNDARY_END
    return Cot(begin, max(begin, end), boundary)


def kept_lengths(length: int, points: int) -> list[int]:
    """The number of tokens that truncations 0 … `points` keep of a chain of thought; halves round to even.

    Raises:
        ValueError: there are no points.
    """
    if points < 1:
        raise ValueError(f"points is {points}: a curve has at least 1 besides the empty thought")
    return [round(length * point / points) for point in range(points + 1)]
