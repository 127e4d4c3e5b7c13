"""A trajectory as the trainer has it: facts, and arrays for what has a value per token, in memory or in a file.

It is made by `codec.decode_group` alone. What it leaves out, texts of spans and contents of documents, is read again
where it is shown or judged: `codec.restore_group`. Its arrays take 4 bytes a token, and 4 more for each that the policy
sampled; the message has four times as much. In a file every rank reads them.
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_proto.v1.trajectory_pb2 import PolicySegment, Purpose, Sampling, Score, Status, Timings, Turn
from forage_runtime.files import durable

ReadPacked: TypeAlias = Callable[[], PackedGroup]
"""Reads a group as it was on the stream."""
Array: TypeAlias = npt.NDArray[Any]
_NUMBER_BYTES = 4
_EPOCH = re.compile(r"e(\d+)-")
"""Begins the name of a trainer's folder of columns; those of earlier versions have no epoch."""


class TokenCounts(NamedTuple):
    """tokens: of prompt and response; response: those that have a mask; sampled: those of the policy among them.

    whole: whether every field has one value for each token of the response.
    """

    tokens: int
    response: int
    sampled: int
    whole: bool


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Trajectory:
    """One sample of one prompt. Facts are those of the message of the same name.

    turns: without their documents.
    counts: of its tokens. runs: of its response, see `Columns.runs`.
    digest: SHA-256 of what a step may train on: place, tokens, mask, log-probabilities and reward.
    stored: its columns; None where the counts are not `whole`.
    source: reads its group, and its number in there.
    """

    id: str
    group_uid: str
    sample: int
    data_source: str
    prompt_length: int
    segments: Sequence[PolicySegment]
    turns: Sequence[Turn]
    score: Score
    validation_score: Score
    finished: bool
    truncated: bool
    valid_searches: int
    status: Status.ValueType
    status_detail: str
    timings: Timings
    sampling: Sampling
    counts: TokenCounts
    runs: npt.NDArray[np.int32] = field(repr=False)
    digest: bytes
    stored: AnyColumns | None = field(repr=False)
    source: tuple[ReadPacked, int] = field(repr=False)

    @property
    def columns(self) -> AnyColumns:
        """What it has a value per token of.

        Raises:
            ValueError: some tokens lack a value.
        """
        if self.stored is None:
            raise ValueError(f"trajectory {self.id} lacks values of some tokens: it cannot be trained on")
        return self.stored

    def read_mask(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """The loss mask and the turn ids, each (response,)."""
        lengths, mask, turns = self.runs.T
        return np.repeat(mask, lengths), np.repeat(turns, lengths)

    def list_turns(self) -> list[int]:
        """The turn ids of the tokens that the policy sampled, each once, in the order of their first token."""
        values, first = np.unique(self.runs[self.runs[:, 1] > 0, 2], return_index=True)
        return [int(turn) for turn in values[np.argsort(first)]]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Group:
    """All samples of one prompt. Facts are those of the message `TrajectoryGroup`."""

    run_id: str
    group_uid: str
    purpose: Purpose.ValueType
    batch: int
    position: int
    attempt: int
    traceparent: str
    trajectories: tuple[Trajectory, ...]
    read_packed: ReadPacked = field(repr=False)


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
