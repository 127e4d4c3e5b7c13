"""A group of two processes, one of which sends pieces of files to the other: through gloo's sockets, or NCCL.

It needs torch, which the trainer and the engines have. The steps are the same for either backend: a piece lies in one
of `LANES` buffers of the CPU; with NCCL a buffer on the GPU carries it. The group belongs to one transfer: unlike one
of `new_group`, it is none of the trainer's collectives.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from forage_weights.direct import GLOO, NCCL

Piece = TypeVar("Piece")
LANES = 2
"""Pieces in memory: one is read or written while one is on its way."""
_LOOK_S = 0.0005
_ENDLESS = timedelta(days=365)
_NCCL_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Read by the constructor of a group: without it torch ends the process when the other end of a transfer dies."""


def find_gpu() -> str:
    """The GPU that NCCL can use in this process, by its UUID; empty: there is none, or no NCCL."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return ""
    try:
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    except Exception:  # noqa: BLE001 - a GPU that fails is none, and sockets do without it
        return ""


def overlap(pieces: Iterable[Piece], begin: Callable[[int, Piece], None], end: Callable[[int, Piece], None]) -> None:
    """Begin and end every piece in its order, each in a lane: later ones are begun before one is ended."""
    going: deque[tuple[int, Piece]] = deque()
    for number, piece in enumerate(pieces):
        if len(going) == LANES:
            end(*going.popleft())
        going.append((number % LANES, piece))
        begin(*going[-1])
    while going:
        end(*going.popleft())


class Pair:
    """One end of a transfer.

    Args:
        store: with a prefix of this transfer.
        rank: `SENDER` or `RECEIVER`.
        host: address of this machine towards the other end.
        limit: longest wait for the other end, in each step.

    Attributes:
        views: the buffers of the lanes.

    Raises:
        RuntimeError: the other end did not come within the time limit.
    """

    def __init__(
        self, backend: str, store: dist.Store, rank: int, host: str, limit: timedelta, piece_bytes: int
    ) -> None:
        self._other, self._limit = 1 - rank, limit
        self._on_gpu = backend == NCCL
        self._group: Any = _GROUPS[backend](store, rank, host, limit)
        shape = (LANES, piece_bytes)
        self._buffers = torch.empty(shape, dtype=torch.uint8, pin_memory=self._on_gpu)
        self._carriers = self._buffers
        self._stream: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._on_gpu:
            self._carriers = torch.empty(shape, dtype=torch.uint8, device="cuda")
            self._stream = torch.cuda.stream(torch.cuda.Stream())  # not behind the kernels of the training
        self.views = [memoryview(buffer.numpy()) for buffer in self._buffers]
        self._works: list[dist.Work | None] = [None] * LANES

    def send(self, lane: int, size: int) -> None:
        """Begin to send the first bytes of a lane."""
        with self._stream:
            if self._on_gpu:
                self._carriers[lane, :size].copy_(self._buffers[lane, :size], non_blocking=True)
            self._works[lane] = self._group.send([self._carriers[lane, :size]], self._other, 0)

    def receive(self, lane: int, size: int) -> None:
        """Begin to receive the first bytes of a lane."""
        with self._stream:
            self._works[lane] = self._group.recv([self._carriers[lane, :size]], self._other, 0)

    def finish(self, lane: int) -> None:
        """Return once what was begun in a lane has ended: what was received is in its buffer then.

        Raises:
            RuntimeError: it failed, or the other end has stopped.
        """
        work, self._works[lane] = self._works[lane], None
        assert work is not None
        if not self._on_gpu:
            work.wait()  # wait: has the group's time limit
            return
        deadline = time.monotonic() + self._limit.total_seconds()
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"NCCL: no piece within {self._limit.total_seconds():g} s")
            time.sleep(_LOOK_S)  # wait: ends at the deadline; a wait of NCCL's own would end the process
        work.wait()  # wait: it has ended, this raises its error
        with self._stream:
            self._buffers[lane].copy_(self._carriers[lane])

    def close(self) -> None:
        """End the group. Pieces on their way are lost."""
        self._works.clear()  # while the buffers are still there, which gloo may use
        if self._on_gpu:
            self._group._set_default_timeout(self._limit)  # of the abort itself
            self._group.abort()


def _open_gloo(store: dist.Store, rank: int, host: str, limit: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = limit
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, 2, options)


def _open_nccl(store: dist.Store, rank: int, host: str, limit: timedelta) -> Any:
    # The processes' own groups, made before, keep their settings. A limit of the group would end the process, too.
    os.environ.update(_NCCL_ENVIRONMENT)
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(int(limit.total_seconds())))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _ENDLESS
    options.config.blocking = 0  # else nothing ends the wait for an end that never comes
    store.set_timeout(limit)
    return dist.ProcessGroupNCCL(store, rank, 2, options)


_GROUPS = {GLOO: _open_gloo, NCCL: _open_nccl}
