"""Rows of a step: split into mini-batches, sharded over processes, and gathered again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from tensordict import TensorDict

from forage_trainer.data.tensors import make_jagged, select_rows, split_rows

_NO_ROW = -1


def split_mini_batches(positions: Sequence[int], groups: int, size: int, epochs: int) -> Iterator[list[int]]:
    """Yield the row numbers of each update: `size` groups by position, `epochs` times; empty updates are left out.

    Cut by position, not by row: an update has the same groups whichever of their rows are valid.
    """
    for _ in range(epochs):
        for begin in range(0, groups, size):
            rows = [row for row, position in enumerate(positions) if begin <= position < begin + size]
            if rows:
                yield rows


def distribute_rows(lengths: Sequence[int], processes: int) -> list[list[int]]:
    """Row numbers of each process: longest first, back and forth, equally many each; -1 where rows run out.

    Back and forth balances the tokens of the processes, which wait for the slowest.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    order += [_NO_ROW] * (-len(order) % processes)
    shares: list[list[int]] = [[] for _ in range(processes)]
    for begin in range(0, len(order), processes):
        turn = order[begin : begin + processes]
        back = begin // processes % 2
        for share, row in zip(shares, reversed(turn) if back else turn, strict=True):
            share.append(row)
    return shares


def shard_rows(data: TensorDict, rank: int, processes: int) -> TensorDict:
    """Select the rows of one process, as many as every other has.

    Where rows run out, the shortest row fills the gap with `row` -1 and masks of 0. It contributes nothing, but every
    process must run equally many forward passes, since each pass gathers parameters from all of them.
    """
    if processes == 1:
        return data
    lengths = data["input_ids"].offsets().diff().tolist()
    rows = distribute_rows(lengths, processes)[rank]
    shortest = min(range(len(lengths)), key=lengths.__getitem__)
    share = select_rows(data, [shortest if row == _NO_ROW else row for row in rows])
    real = [row != _NO_ROW for row in rows]
    share["row"] = torch.where(torch.tensor(real), share["row"], _NO_ROW)
    for name in ("response_mask", "loss_mask"):
        share[name] = make_jagged([mask * kept for mask, kept in zip(split_rows(share[name]), real, strict=True)])
    return share


def scatter_rows(like: torch.Tensor, parts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Put (row numbers, values over the response) of any rows into (rows, tokens) shaped as `like`; 0 elsewhere."""
    whole = torch.zeros_like(like)
    for rows, values in parts:
        real = rows != _NO_ROW
        whole[rows[real].cpu(), : values.shape[1]] = values.detach()[real].to(whole)
    return whole
