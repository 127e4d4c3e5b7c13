"""Groups (the samples of one prompt): which rows take part, and values normalized within a group."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

EPSILON = 1e-6
_ROUNDINGS = 16
"""Rounding errors that a sum over tokens may have gathered, in units of its type's precision."""


@dataclass(frozen=True)
class Participation:
    """The rows that enter baseline and loss.

    used: (rows,) bool. dead_groups: number of groups with too few valid rows, none of whose rows is used.
    """

    used: torch.Tensor
    dead_groups: int


def find_participants(uids: Sequence[Hashable], valid: torch.Tensor, min_samples: int) -> Participation:
    """Use the valid rows of groups that have at least `min_samples` of them.

    A failed row is left out of the baseline too: a failure of the infrastructure says nothing about the policy, so
    it must not count as a reward of 0.

    Args:
        uids: group of each row.
        valid: (rows,) bool; status OK throughout, and at least one state token.
        min_samples: see `AdvantageEstimator.min_samples`.
    """
    group, sizes = number_groups(uids)
    alive = torch.zeros(len(sizes), dtype=torch.long).index_add(0, group, valid.long()) >= min_samples
    return Participation(valid & alive[group], int((~alive).sum()))


def measure_rounding(sizes: torch.Tensor) -> torch.Tensor:
    """Bound the rounding error of sums, in double precision.

    Args:
        sizes: the sum of the terms' absolute values of each, in the type in which the terms were rounded.
    """
    return sizes.double() * (_ROUNDINGS * torch.finfo(sizes.dtype).eps)


def normalize_in_groups(
    values: torch.Tensor, uids: Sequence[Hashable], by_std: bool = True, rounding: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute (value - mean) / (std + 1e-6) within each uid, (values,), in double precision.

    std has ddof 1; a value alone in its group has mean 0 and std 1, as in verl. Values of a group that differ by no
    more than rounding are equal, and give exactly 0.

    Args:
        values: (values,); uids: group of each.
        by_std: False leaves out the division.
        rounding: (values,), how far a value may be off; by default that of one number in double precision.
    """
    values = values.double()
    rounding = measure_rounding(values.abs()) if rounding is None else rounding
    group, sizes = number_groups(uids)
    empty = torch.zeros(len(sizes), dtype=torch.double)
    highest, lowest, error = (
        empty.scatter_reduce(0, group, part, how, include_self=False)
        for part, how in ((values, "amax"), (values, "amin"), (rounding, "amax"))
    )
    alone = (sizes == 1)[group]
    # Else a rounding error would be divided by epsilon, and equal rewards would have advantages.
    equal = (highest - lowest <= error)[group]
    # Shifted by the group's maximum: a mean of large values loses digits.
    shifted = values - highest[group]
    mean = empty.index_add(0, group, shifted) / sizes
    centered = torch.where(alone, values, torch.where(equal, 0.0, shifted - mean[group]))
    squares = empty.index_add(0, group, centered**2)
    std = torch.where(alone, 1.0, (squares / (sizes - 1).clamp(min=1)).sqrt()[group])
    return centered / (std + EPSILON) if by_std else centered


def number_groups(uids: Sequence[Hashable]) -> tuple[torch.Tensor, torch.Tensor]:
    """Number the groups by first appearance: (group number of each row, size of each group)."""
    numbers = {uid: number for number, uid in enumerate(dict.fromkeys(uids))}
    group = torch.tensor([numbers[uid] for uid in uids], dtype=torch.long)
    return group, torch.bincount(group, minlength=len(numbers))
