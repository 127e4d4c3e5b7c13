"""How trajectories may be looked at: words of the command's options."""

from __future__ import annotations

from enum import StrEnum


class SortKey(StrEnum):
    """What rows can be sorted by."""

    REWARD = "reward"
    ADVANTAGE = "advantage"
    MISMATCH = "mismatch"
    LENGTH = "length"


class Colour(StrEnum):
    """What the colour of the policy's text says."""

    AUTHOR = "author"
    ADVANTAGE = "advantage"
    MISMATCH = "mismatch"
