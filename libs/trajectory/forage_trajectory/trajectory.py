"""A trajectory as the trainer has it: facts, and arrays for what has a value per token.

It is made by `codec.decode_group` alone. What it leaves out, texts of spans and contents of documents, is read again
where it is shown or judged: `codec.restore_group`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_proto.v1.trajectory_pb2 import PolicySegment, Purpose, Sampling, Score, Status, Timings, Turn
from forage_trajectory.columns import AnyColumns

ReadPacked: TypeAlias = Callable[[], PackedGroup]
"""Reads a group as it was on the stream."""


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
