"""Rows that begin with the same tokens as a tree in which each shared token is stored once, and cuts of such rows.

Rows are stored one after another in the order of their tokens, each without the prefix that it shares with a row before
it: what is left of a row is its tail. In that order no earlier row shares more with a row than the one directly before
it, so the tails together hold every token of the tree once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tail:
    """The tokens that a row adds to the tree.

    size: number of them, at least 1; they are the last ones of the path.
    path: pieces that hold the row's tokens from its first to its last.
    """

    size: int
    path: tuple[int, ...]


@dataclass(frozen=True)
class PrefixTree:
    """Where the tokens of rows are in their tree, and what each of them follows.

    places: place in the tree of each token of the rows that lie end to end in the given order, (tokens of rows,).
    firsts: the first of those tokens that has each place, (tokens of the tree,).
    pieces: sizes of the parts of the tree, in order, that are in a row as a whole or not at all.
    tails: in order; they hold every place once.
    """

    places: Ids
    firsts: Ids
    pieces: tuple[int, ...]
    tails: tuple[Tail, ...]


def build_tree(rows: Sequence[Ids]) -> PrefixTree:
    """Build the tree of rows, each of at least one token."""
    offsets = np.cumsum([0, *map(len, rows)])
    places: Ids = np.empty(offsets[-1], np.int64)
    path: Ids = places[:0]
    firsts: list[Ids] = []
    spans: list[tuple[int, int]] = []
    paths: list[tuple[int, list[tuple[int, int]]]] = []  # of each tail: its size, and the spans of places of its row
    size = 0
    for row, shared in _walk(rows):
        added = len(rows[row]) - shared
        path = np.concatenate([path[:shared], np.arange(size, size + added)])
        places[offsets[row] : offsets[row + 1]] = path
        firsts.append(np.arange(offsets[row] + shared, offsets[row + 1]))
        spans = _keep(spans, shared)
        if added:
            spans = [*spans, (size, size + added)]
            paths.append((added, spans))
        size += added
    bounds = sorted({place for _, spans in paths for span in spans for place in span})
    index = {place: number for number, place in enumerate(bounds)}
    tails = [
        Tail(added, tuple(piece for begin, end in spans for piece in range(index[begin], index[end])))
        for added, spans in paths
    ]
    pieces = tuple(end - begin for begin, end in pairwise(bounds))
    return PrefixTree(places, np.concatenate(firsts), pieces, tuple(tails))


def cut_trees(rows: Sequence[Ids], prompts: Sequence[int], target: int, limit: int) -> list[list[int]]:
    """Cut row numbers into micro-batches of whole groups; rows with the same prompt are a group.

    Groups are put together up to `target` tokens of their trees. A group is cut where its tree would exceed `limit`, or
    where more than `target` tokens of it would be predicted: a CPU keeps the logits of each.

    Args:
        prompts: number of tokens of each row's prompt, at least 1.
    """
    groups: dict[bytes, list[int]] = {}
    for row, size in enumerate(prompts):
        groups.setdefault(rows[row][:size].tobytes(), []).append(row)
    cuts: list[list[int]] = []
    room = 0
    for group in groups.values():
        for part, tokens in _cut_group([rows[row] for row in group], prompts[group[0]], target, limit):
            if tokens > room:
                cuts.append([])
                room = target
            cuts[-1] += [group[row] for row in part]
            room -= tokens
    return cuts


def count_tokens(rows: Sequence[Ids]) -> int:
    """Count the tokens of the tree of rows."""
    return sum(len(rows[row]) - shared for row, shared in _walk(rows))


def _cut_group(rows: Sequence[Ids], prompt: int, target: int, limit: int) -> Iterator[tuple[list[int], int]]:
    """Yield parts of a group and the tokens of their trees."""
    part: list[int] = []
    tokens = predicted = 0
    for row, shared in _walk(rows):
        size = len(rows[row])
        if part and (tokens + size - shared > limit or predicted + size - max(shared, prompt) > target):
            yield part, tokens
            part, tokens, predicted, shared = [], 0, 0, 0
        part.append(row)
        tokens, predicted = tokens + size - shared, predicted + size - max(shared, prompt)
    yield part, tokens


def _walk(rows: Sequence[Ids]) -> Iterator[tuple[int, int]]:
    """Yield the numbers of rows in the order of their tokens, and what each shares with the one before it."""
    # Of numbers with the highest byte first, the order of bytes is the order of tokens.
    keys = [row.astype(">u4").tobytes() for row in rows]
    before: Ids = np.empty(0, np.int64)
    for row in sorted(range(len(rows)), key=keys.__getitem__):
        both = min(len(before), len(rows[row]))
        differs = before[:both] != rows[row][:both]
        yield row, int(differs.argmax()) if differs.any() else both
        before = rows[row]


def _keep(spans: Sequence[tuple[int, int]], tokens: int) -> list[tuple[int, int]]:
    """Keep the first tokens of spans of places."""
    kept = []
    for begin, end in spans:
        if tokens <= 0:
            break
        kept.append((begin, min(end, begin + tokens)))
        tokens -= end - begin
    return kept
