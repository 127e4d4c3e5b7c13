"""Values per token as bytes: run lengths, byte planes, zstd frames.

A plane holds the bytes of one weight of many numbers. Those of the high bytes take few values and code well; between
those of the low bytes zstd would find them less often.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard
from google.protobuf.message import DecodeError

from forage_proto.v1.packed_pb2 import Runs
from forage_proto.v1.trajectory_pb2 import Role, Span

_LEVEL = 3
_MOST_VALUES = 2**26
_PROMPT, _MODEL, _ENV = Role.ROLE_PROMPT, Role.ROLE_MODEL, Role.ROLE_ENV  # looking them up costs as much as their use
Ints: TypeAlias = npt.NDArray[np.int32]
Words: TypeAlias = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class TokenValues:
    """What a trajectory has a value per token of, as the fields of its message.

    token_ids: (tokens,) int32, prompt and response.
    loss_mask, turn_ids: (response,) int32; logprobs: (response,) float32.
    """

    token_ids: Ints
    loss_mask: Ints
    turn_ids: Ints
    logprobs: npt.NDArray[np.float32]


class Room:
    """How many values of a column the trajectories of one group may still have, whatever a damaged entry says."""

    def __init__(self) -> None:
        self._left = _MOST_VALUES

    def take(self, count: int) -> None:
        """
        Raises:
            DecodeError: there is no room for so many values.
        """
        self._left -= count
        if count < 0 or self._left < 0:
            raise DecodeError(f"a packed group names more than {_MOST_VALUES} values of a column")


def derive_marks(spans: Sequence[Span]) -> tuple[Runs, Runs] | None:
    """Derive loss mask and turn ids of a response from who wrote each of its spans; None where they do not say."""
    mask, turn_ids = Runs(), Runs()
    turn = 0
    for span in spans:
        if span.role == _PROMPT and not mask.lengths:
            continue
        if span.role not in (_MODEL, _ENV) or span.end < span.begin:
            return None
        is_sampled = span.role == _MODEL
        turn += is_sampled
        for runs, value in ((mask, int(is_sampled)), (turn_ids, turn if is_sampled else -1)):
            runs.values.append(value)
            runs.lengths.append(span.end - span.begin)
    return mask, turn_ids


def encode_runs(values: npt.NDArray[Any]) -> Runs:
    """Encode a list of numbers as runs of equal ones."""
    if not len(values):
        return Runs()
    begins = np.concatenate([[0], np.flatnonzero(np.diff(values)) + 1])
    lengths = np.diff(np.concatenate([begins, [len(values)]]))
    return Runs(values=values[begins].tolist(), lengths=lengths.tolist())


def decode_runs(runs: Runs, room: Room) -> Ints:
    """
    Raises:
        DecodeError: lists of different lengths, or too many values.
    """
    if len(runs.values) != len(runs.lengths):
        raise DecodeError(f"{len(runs.values)} runs have {len(runs.lengths)} lengths")
    room.take(sum(runs.lengths))
    values: Ints = np.repeat(np.array(runs.values, dtype=np.int64).astype(np.int32), runs.lengths)
    return values


def split_planes(values: Words, count: int) -> list[bytes]:
    """The `count` lowest bytes of each value, as planes."""
    columns = values.astype("<u4").view(np.uint8).reshape(-1, 4)
    return [columns[:, place].tobytes() for place in range(count)]


def join_planes(data: memoryview, length: int, count: int) -> Words:
    """The inverse of `split_planes`."""
    columns: npt.NDArray[np.uint8] = np.zeros((length, 4), dtype=np.uint8)
    for place in range(count):
        columns[:, place] = np.frombuffer(data, np.uint8, length, offset=place * length)
    values: Words = columns.reshape(-1).view("<u4").astype(np.uint32, copy=False)
    return values


def compress(parts: Iterable[bytes]) -> bytes:
    """Compress into one frame, in which each part has statistics of its own; its end is a checksum."""
    parts = list(parts)
    # A compressor is not for several threads at a time.
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compressobj(size=sum(map(len, parts)))
    pieces = []
    for part in parts:
        pieces += [compressor.compress(part), compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join([*pieces, compressor.flush()])


def decompress(frame: bytes, most: int) -> bytes:
    """Decompress a frame, which says how long its content is.

    Raises:
        DecodeError: it is damaged, or longer than `most` bytes: nothing is allocated then.
    """
    try:
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= most:
            raise DecodeError(f"a packed group has a frame of {size} bytes, at most {most} are expected")
        return bytes(zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False))
    except (ValueError, zstandard.ZstdError) as error:
        raise DecodeError(f"a packed group has a damaged frame ({error})") from None
