"""Groups (the samples of one prompt): who takes part, and values compared within them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

EPSILON = 1e-6


@dataclass(frozen=True)
class Participation:
    """Which rows enter baseline and loss.

    used: (rows,) bool. dead_groups: groups that had too few valid rows, so none of their rows is used.
    """

    used: torch.Tensor
    dead_groups: int


def participation(uids: Sequence[Hashable], valid: torch.Tensor, least: int) -> Participation:
    """A valid row is used if its group has at least so many of them.

    Args:
        uids: group of each row.
        valid: (rows,) bool; status OK throughout, and at least one state token.
        least: see `AdvantageEstimator.min_samples`.
    """
    group, sizes = numbered(uids)
    alive = torch.zeros(len(sizes), dtype=torch.long).index_add(0, group, valid.long()) >= least
    return Participation(valid & alive[group], int((~alive).sum()))


def normalised(values: torch.Tensor, uids: Sequence[Hashable], by_std: bool = True) -> torch.Tensor:
    """(value - mean) / (std + 1e-6) within each uid, (values,), in double precision.

    The deviation has ddof 1; a value alone in its group is measured against mean 0 and deviation 1.

    Args:
        values: (values,); uids: group of each.
        by_std: False leaves out the division.
    """
    values = values.double()
    group, sizes = numbered(uids)
    # Measured from the group's highest: equal rewards must give exactly 0, not a rounding divided by epsilon.
    highest = torch.full((len(sizes),), -torch.inf, dtype=torch.double).scatter_reduce(0, group, values, "amax")
    alone = (sizes == 1)[group]
    moved = values - highest[group]
    mean = torch.zeros(len(sizes), dtype=torch.double).index_add(0, group, moved) / sizes
    centred = torch.where(alone, values, moved - mean[group])
    squares = torch.zeros(len(sizes), dtype=torch.double).index_add(0, group, centred**2)
    std = torch.where(alone, 1.0, (squares / (sizes - 1).clamp(min=1)).sqrt()[group])
    return centred / (std + EPSILON) if by_std else centred


def numbered(uids: Sequence[Hashable]) -> tuple[torch.Tensor, torch.Tensor]:
    """(group number of each row, size of each group); numbers follow first appearance."""
    numbers = {uid: number for number, uid in enumerate(dict.fromkeys(uids))}
    group = torch.tensor([numbers[uid] for uid in uids], dtype=torch.long)
    return group, torch.bincount(group, minlength=len(numbers))
