"""Rows that share prefixes, at random."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

_ROWS, _FORKS, _SEGMENT = 16, 6, 12


def draw_tree(chance: random.Random) -> list[npt.NDArray[np.int64]]:
    """Draw up to 16 rows of two tokens or more: each continues a part of another, up to six times from the first.

    With three token ids rows share more than they were made to. A row may end within another, or equal it.
    """
    rows = [(_draw_tokens(chance, 2), 0)]
    for _ in range(chance.randrange(_ROWS)):
        row, forks = chance.choice([one for one in rows if one[1] < _FORKS])
        rows.append((row[: chance.randint(2, len(row))] + _draw_tokens(chance, 0), forks + 1))
    chance.shuffle(rows)
    return [np.array(row, np.int64) for row, _ in rows]


def _draw_tokens(chance: random.Random, least: int) -> list[int]:
    return [chance.randrange(3) for _ in range(chance.randint(least, _SEGMENT))]
