"""Rows of a step: split into mini-batches, sharded over processes, and gathered again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from tensordict import TensorDict

from forage_trainer.data.tensors import NO_ROW, Rows, RowValues


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
    order += [NO_ROW] * (-len(order) % processes)
    shares: list[list[int]] = [[] for _ in range(processes)]
    for begin in range(0, len(order), processes):
        turn = order[begin : begin + processes]
        back = begin // processes % 2
        for share, row in zip(shares, reversed(turn) if back else turn, strict=True):
            share.append(row)
    return shares


def share_rows(rows: Rows, numbers: Sequence[int], rank: int, processes: int) -> tuple[list[int], int]:
    """Choose the rows of one process among the given ones, as many as every other has; returns the fillers, too.

    Where rows run out, the shortest row fills the gap at the end. It contributes nothing, but every process must run
    equally many forward passes, since each pass gathers parameters from all of them.
    """
    if processes == 1:
        return list(numbers), 0
    lengths = [rows.prompts[row] + rows.responses[row] for row in numbers]
    share = distribute_rows(lengths, processes)[rank]
    shortest = numbers[min(range(len(lengths)), key=lengths.__getitem__)]
    return [shortest if index == NO_ROW else numbers[index] for index in share], share.count(NO_ROW)


def build_share(
    rows: Rows, numbers: Sequence[int], rank: int, processes: int, values: Mapping[str, RowValues] | None = None
) -> TensorDict:
    """Build the engine's input of one process's share of the given rows, see `Rows.build` and `share_rows`."""
    share, filler = share_rows(rows, numbers, rank, processes)
    return rows.build(share, values, filler)


def scatter_rows(shape: tuple[int, int], parts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Put (row numbers, values over the response) of any rows into float32 (rows, tokens) on the CPU; 0 elsewhere."""
    whole = torch.zeros(shape)
    for rows, values in parts:
        real = rows != NO_ROW
        whole[rows[real].cpu(), : values.shape[1]] = values.detach()[real].to(whole)
    return whole
