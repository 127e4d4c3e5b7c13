"""Rows of a step: cut into mini-batches, dealt out to processes, and put together again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from tensordict import TensorDict

from forage_trainer.data.tensors import jagged, rows_of, select

_NO_ROW = -1


class Rows(Protocol):
    """What workers need of a step's tensors (`tensors.StepTensors`)."""

    @property
    def data(self) -> TensorDict:
        """Jagged tensors, and `row`, each row's number."""

    @property
    def mask(self) -> torch.Tensor:
        """(rows, tokens)."""

    @property
    def positions(self) -> Sequence[int]:
        """Place of each row's group within the batch."""


def mini_batches(positions: Sequence[int], groups: int, size: int, epochs: int) -> Iterator[list[int]]:
    """Row numbers of each update: `size` groups by their place in the batch, `epochs` times; none is empty."""
    for _ in range(epochs):
        for begin in range(0, groups, size):
            rows = [row for row, place in enumerate(positions) if begin <= place < begin + size]
            if rows:
                yield rows


def deal(lengths: Sequence[int], processes: int) -> list[list[int]]:
    """Row numbers of each process: longest first, back and forth, equally many; -1 where rows run out."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    order += [_NO_ROW] * (-len(order) % processes)
    shares: list[list[int]] = [[] for _ in range(processes)]
    for begin in range(0, len(order), processes):
        turn = order[begin : begin + processes]
        back = begin // processes % 2
        for share, row in zip(shares, reversed(turn) if back else turn, strict=True):
            share.append(row)
    return shares


def share_of(data: TensorDict, rank: int, processes: int) -> TensorDict:
    """The rows of one process, as many as every other has.

    Where rows run out the shortest stands in once more, with `row` -1 and masks of 0, so that it counts for nothing.
    """
    if processes == 1:
        return data
    lengths = data["input_ids"].offsets().diff().tolist()
    rows = deal(lengths, processes)[rank]
    shortest = min(range(len(lengths)), key=lengths.__getitem__)
    share = select(data, [shortest if row == _NO_ROW else row for row in rows])
    real = [row != _NO_ROW for row in rows]
    share["row"] = torch.where(torch.tensor(real), share["row"], _NO_ROW)
    for name in ("response_mask", "loss_mask"):
        share[name] = jagged([mask * kept for mask, kept in zip(rows_of(share[name]), real, strict=True)])
    return share


def by_row(like: torch.Tensor, parts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """(row numbers, values over the response, padded with 0) of any rows → (rows, tokens) as `like`; 0 elsewhere."""
    whole = torch.zeros_like(like)
    for rows, values in parts:
        real = rows != _NO_ROW
        whole[rows[real].cpu(), : values.shape[1]] = values.detach()[real].to(whole)
    return whole
