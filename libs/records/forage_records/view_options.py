"""Values of the options of `forage trajectories`."""

from __future__ import annotations

from enum import StrEnum


class SortKey(StrEnum):
    """Value to sort trajectories by."""

    REWARD = "reward"
    ADVANTAGE = "advantage"
    MISMATCH = "mismatch"
    LENGTH = "length"


class Colour(StrEnum):
    """Meaning of the colour of the policy's text."""

    AUTHOR = "author"
    ADVANTAGE = "advantage"
    MISMATCH = "mismatch"
