"""Groups as they arrive from the stream: small messages, whose values of tokens are arrays.

They stand in for the messages `TrajectoryGroup` and `Trajectory` wherever these are read: every field but those of
tokens and texts is that of the message. What reads tokens asks the functions below, which take either kind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence, Sized
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_proto.v1.trajectory_pb2 import Trajectory, TrajectoryGroup
from forage_trajectory.arrays import AnyColumns, Array, ColumnFolder, Columns, find_runs
from forage_trajectory.packing import pack_group, unpack_columns, unpack_facts, unpack_group

Source: TypeAlias = Callable[[], PackedGroup]
TOKEN_FIELDS = ("token_ids", "loss_mask", "turn_ids", "logprobs")

_NONE = Columns(np.empty(0, np.int32), np.empty((0, 3), np.int32), np.empty(0, np.float32))


class TokenCounts(NamedTuple):
    """tokens: of prompt and response; response: those that have a mask; sampled: those of the policy among them.

    whole: whether every field has one value for each token of the response.
    """

    tokens: int
    response: int
    sampled: int
    whole: bool


class ArrivedTrajectory:
    """A trajectory without its values of tokens, and without texts.

    columns: these values; None where the counts are not `whole`. runs: see `Columns`.
    digest: of what a step may train on, see `digest_trajectory`.
    source: reads its group as it was on the stream, and its number in there.
    """

    __slots__ = ("columns", "counts", "digest", "head", "runs", "source")
    columns: AnyColumns | None
    counts: TokenCounts
    digest: bytes
    head: Trajectory
    runs: npt.NDArray[np.int32]
    source: tuple[Source, int]

    def __init__(
        self,
        head: Trajectory,
        columns: AnyColumns | None,
        runs: npt.NDArray[np.int32],
        counts: TokenCounts,
        digest: bytes,
        source: tuple[Source, int],
    ) -> None:
        for name, value in zip(self.__slots__, (columns, counts, digest, head, runs, source), strict=True):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name in TOKEN_FIELDS:
            raise AttributeError(f"a trajectory that has arrived has no {name}: ask for its columns")
        return getattr(self.head, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.head, name, value)


class ArrivedGroup:
    """A group whose trajectories are `ArrivedTrajectory`.

    source: reads the group as it was on the stream.
    """

    __slots__ = ("head", "source", "trajectories")

    def __init__(self, head: TrajectoryGroup, trajectories: Sequence[ArrivedTrajectory], source: Source) -> None:
        self.head = head
        self.trajectories = trajectories
        self.source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)


def decode_group(packed: PackedGroup, folder: ColumnFolder | None = None) -> TrajectoryGroup:
    """Decode a group of the stream into an `ArrivedGroup`, which is used as the message.

    Args:
        folder: puts the columns, and the group as it was on the stream, into a file there.

    Raises:
        DecodeError: it is damaged.
        DiskFullError: there is no room for the file.
    """
    head = unpack_facts(packed)
    counts: list[TokenCounts] = []
    columns: list[Columns] = []
    for facts, own in zip(head.trajectories, unpack_columns(packed), strict=True):
        counts.append(_count(facts.prompt_length, own.token_ids, own.loss_mask, own.turn_ids, own.logprobs))
        # A copy: a view would keep the whole group in memory.
        is_whole = counts[-1].whole
        columns.append(_compact(own.token_ids.copy(), own.loss_mask, own.turn_ids, own.logprobs) if is_whole else _NONE)
    kept: Sequence[AnyColumns] = columns
    source: Source = partial(_give, packed)
    if folder is not None:
        kept, rest = folder.write(columns, packed.SerializeToString())
        source = partial(_read_packed, rest)
    trajectories = []
    for number, (facts, one) in enumerate(zip(head.trajectories, columns, strict=True)):
        digest = _digest(f"{head.position}/{facts.data_source}/{facts.sample}", one, facts.score.total)
        held = kept[number] if counts[number].whole else None
        trajectories.append(ArrivedTrajectory(facts, held, one.runs, counts[number], digest, (source, number)))
    return cast(TrajectoryGroup, ArrivedGroup(head, trajectories, source))


def encode_group(group: TrajectoryGroup) -> PackedGroup:
    """The group as it was on the stream; a message is packed."""
    return group.source() if isinstance(group, ArrivedGroup) else pack_group(group)


def restore_trajectories(group: TrajectoryGroup) -> list[Trajectory]:
    """The trajectories of a group as whole messages, with the status that they have now; slow."""
    if not isinstance(group, ArrivedGroup):
        return list(group.trajectories)
    whole = unpack_group(group.source())
    for message, arrived in zip(whole.trajectories, group.trajectories, strict=True):
        message.status, message.status_detail = arrived.status, arrived.status_detail
    return list(whole.trajectories)


def restore_trajectory(trajectory: Trajectory) -> Trajectory:
    """A trajectory as a whole message; slow."""
    if not isinstance(trajectory, ArrivedTrajectory):
        return trajectory
    read, number = trajectory.source
    return unpack_group(read()).trajectories[number]


def count_tokens(trajectory: Trajectory) -> TokenCounts:
    """Count a trajectory's tokens."""
    if isinstance(trajectory, ArrivedTrajectory):
        return trajectory.counts
    mask = np.asarray(trajectory.loss_mask, np.int64)
    return _count(trajectory.prompt_length, trajectory.token_ids, mask, trajectory.turn_ids, trajectory.logprobs)


def read_columns(trajectory: Trajectory) -> AnyColumns:
    """The columns of a trajectory whose counts are `whole`; those of a message are made."""
    if isinstance(trajectory, ArrivedTrajectory):
        if trajectory.columns is None:
            raise ValueError(f"trajectory {trajectory.id} lacks values of some tokens: it cannot be trained on")
        return trajectory.columns
    ids, log_probs = np.asarray(trajectory.token_ids, np.uint32), np.asarray(trajectory.logprobs, np.float32)
    return _compact(ids.view(np.int32), *read_mask(trajectory), log_probs)


def read_mask(trajectory: Trajectory) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The loss mask and the turn ids, each (response,)."""
    if isinstance(trajectory, ArrivedTrajectory):
        lengths, mask, turns = trajectory.runs.T
        return np.repeat(mask, lengths), np.repeat(turns, lengths)
    return np.asarray(trajectory.loss_mask, np.int32), np.asarray(trajectory.turn_ids, np.int32)


def list_turns(trajectory: Trajectory) -> list[int]:
    """The turn ids of the tokens that the policy sampled, each once, in the order of their first token."""
    if isinstance(trajectory, ArrivedTrajectory):
        sampled = trajectory.runs[trajectory.runs[:, 1] > 0, 2]
    else:
        mask, turns = read_mask(trajectory)
        sampled = turns[mask > 0]
    values, first = np.unique(sampled, return_index=True)
    return [int(turn) for turn in values[np.argsort(first)]]


def digest_trajectory(position: int, trajectory: Trajectory) -> bytes:
    """SHA-256 of place, tokens, mask, log-probabilities and reward of a trajectory whose counts are `whole`.

    Args:
        position: of its group within the batch.
    """
    if isinstance(trajectory, ArrivedTrajectory):
        return trajectory.digest
    columns = read_columns(trajectory).load()
    return _digest(f"{position}/{trajectory.data_source}/{trajectory.sample}", columns, trajectory.score.total)


def _count(prompt_length: int, token_ids: Sized, loss_mask: Array, turn_ids: Sized, log_probs: Sized) -> TokenCounts:
    tokens, response = len(token_ids), len(loss_mask)
    same = tokens - prompt_length == response == len(turn_ids) == len(log_probs)
    return TokenCounts(tokens, response, int(loss_mask.sum()), same and not (loss_mask > 1).any())


def _compact(token_ids: Array, loss_mask: Array, turn_ids: Array, log_probs: Array) -> Columns:
    return Columns(token_ids, find_runs(loss_mask, turn_ids), log_probs[loss_mask > 0])


def _digest(place: str, columns: Columns, reward: float) -> bytes:
    digest = hashlib.sha256(f"{place}\n".encode())
    parts: tuple[tuple[Array, Any], ...] = (
        (np.array([len(columns.token_ids), len(columns.sampled)]), np.uint64),
        (columns.token_ids, np.int32),
        (columns.sampled, np.uint8),
        (columns.log_probs, np.float32),
        (np.array([reward]), np.float64),
    )
    for values, kind in parts:
        digest.update(np.ascontiguousarray(values, dtype=kind))
    return digest.digest()


def _give(packed: PackedGroup) -> PackedGroup:
    return packed


def _read_packed(read: Callable[[], bytes]) -> PackedGroup:
    return PackedGroup.FromString(read())
