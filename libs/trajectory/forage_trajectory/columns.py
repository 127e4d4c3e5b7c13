"""What a trajectory has for each token, as arrays: in memory, or in a file that every rank reads.

4 bytes a token, and 4 more for each that the policy sampled; as a message it has four times as much.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import shutil
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from forage_runtime.files import durable

Array: TypeAlias = npt.NDArray[Any]
_NUMBER_BYTES = 4
_EPOCH = re.compile(r"e(\d+)-")
"""Begins the name of a trainer's folder of columns; those of earlier versions have no epoch."""


@dataclass(frozen=True, eq=False)
class Columns:
    """
    token_ids: (tokens,) int32, of prompt and response.
    runs: (runs, 3) int32, of the response: length of a run of tokens, 1 if the policy sampled them, their turn id.
    log_probs: (sampled tokens,) float32, the engine's, of the tokens that the policy sampled.
    """

    token_ids: npt.NDArray[np.int32]
    runs: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]

    def load(self) -> Columns:
        """As `StoredColumns.load`: they are here."""
        return self

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """(response,), whether the policy sampled the token."""
        return np.repeat(self.runs[:, 1] > 0, self.runs[:, 0])

    def spread_log_probs(self) -> npt.NDArray[np.float32]:
        """(response,), 0 on tokens that the policy did not sample."""
        sampled = self.sampled
        spread: npt.NDArray[np.float32] = np.zeros(len(sampled), np.float32)
        spread[sampled] = self.log_probs
        return spread


def find_runs(loss_mask: Array, turn_ids: Array) -> npt.NDArray[np.int32]:
    """Find the runs of equal values of both, see `Columns.runs`.

    Args:
        loss_mask, turn_ids: (response,) int32.
    """
    if not len(loss_mask):
        return np.empty((0, 3), np.int32)
    changes: npt.NDArray[np.intp] = np.flatnonzero((np.diff(loss_mask) != 0) | (np.diff(turn_ids) != 0)) + 1
    begins = np.concatenate(([0], changes))
    lengths: npt.NDArray[np.intp] = np.diff(np.append(begins, len(loss_mask)))
    return np.stack([lengths, loss_mask[begins], turn_ids[begins]], axis=1).astype(np.int32)


class ColumnFile:
    """A file of columns; the process that wrote it deletes it once nothing of it is needed any more."""

    def __init__(self, path: Path, folder: ColumnFolder | None = None) -> None:
        """
        Args:
            folder: that of this process, if it wrote the file.
        """
        self.path = path
        self._folder = folder  # which would be deleted with all its files
        if folder is not None:
            weakref.finalize(self, _remove, path)

    def read(self, offset: int, size: int) -> bytes:
        """Read a part of it.

        Raises:
            OSError: the file cannot be read, or is too short.
        """
        with self.path.open("rb", buffering=0) as file:
            content = os.pread(file.fileno(), size, offset)
        if len(content) != size:
            raise OSError(f"{self.path} has {len(content)} bytes at {offset}, {size} wanted")
        return content


@dataclass(frozen=True, eq=False)
class StoredColumns:
    """Columns in a file, at `offset` bytes of it; `shape` is (tokens, runs, sampled tokens)."""

    file: ColumnFile
    offset: int
    shape: tuple[int, int, int]

    def load(self) -> Columns:
        """Read them; nothing else of the file is read.

        Raises:
            OSError: as `ColumnFile.read`.
        """
        tokens, runs, sampled = self.shape
        content = self.file.read(self.offset, (tokens + 3 * runs + sampled) * _NUMBER_BYTES)
        numbers = np.frombuffer(content, np.int32)
        both = numbers[: tokens + 3 * runs]
        return Columns(both[:tokens], both[tokens:].reshape(runs, 3), numbers[len(both) :].view(np.float32))


class ColumnFolder:
    """Writes columns where every rank reads them: a folder that all nodes mount.

    The files last no longer than this process needs them, and are not flushed: what is in them is still on the stream.

    read_epoch: returns the trainer's epoch, by which it spares the files of later ones; set it before the first write.
    """

    def __init__(self, folder: Path) -> None:
        self.read_epoch: Callable[[], int] = lambda: 0
        self._parent = folder
        self._numbers = itertools.count()
        self._opening = threading.Lock()
        self._own: Path | None = None

    def write(self, columns: Sequence[Columns], rest: bytes = b"") -> tuple[list[StoredColumns], Callable[[], bytes]]:
        """Write columns into a file of their own.

        Args:
            rest: what follows them in the file.

        Returns:
            The columns, and a function that reads the rest.

        Raises:
            DiskFullError: there is no room.
        """
        path = self._open() / str(next(self._numbers))
        file, offset, stored = ColumnFile(path, self), 0, []
        with durable.detect_full_disk(path):
            self._fill(path, columns, rest)
        for one in columns:
            shape = len(one.token_ids), len(one.runs), len(one.log_probs)
            stored.append(StoredColumns(file, offset, shape))
            offset += (shape[0] + 3 * shape[1] + shape[2]) * _NUMBER_BYTES
        return stored, partial(file.read, offset, len(rest))

    def _open(self) -> Path:
        """Return this process's folder. Before its first file, delete those of earlier trainers, which claim no groups
        now; a trainer that was replaced and does not know it yet finds those of its successor, and they stay."""
        with self._opening:
            if self._own is None:
                epoch = self.read_epoch()
                for other in self._parent.glob("*-*"):
                    name = _EPOCH.match(other.name)
                    if name is None or int(name[1]) < epoch:
                        shutil.rmtree(other, ignore_errors=True)
                own = self._parent / f"e{epoch}-{os.getpid()}-{secrets.token_hex(4)}"
                with durable.detect_full_disk(self._parent):
                    own.mkdir(parents=True, exist_ok=True)
                weakref.finalize(self, shutil.rmtree, own, ignore_errors=True)
                self._own = own
            return self._own

    @staticmethod
    def _fill(path: Path, columns: Sequence[Columns], rest: bytes) -> None:
        with path.open("wb") as out:
            for one in columns:
                for part in (one.token_ids, one.runs, one.log_probs):
                    out.write(np.ascontiguousarray(part).data)
            out.write(rest)


AnyColumns: TypeAlias = Columns | StoredColumns


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
