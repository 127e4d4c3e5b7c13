"""Messages of the direct transport: what an engine asks the trainer for, the answer, and the pieces that follow.

An engine pushes a `Request` to the queue `REQUESTS` of the store that the announcement names. The trainer sets
the key `name_answer(uid)` to an `Answer`. Unless it refuses, both join a group of two under the key prefix `uid`, and
the trainer sends the files one after another, in the order of the request, in the pieces of `split_pieces`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forage_common.errors import ForageError

REQUESTS = "forage/requests"
SENDER, RECEIVER = 0, 1
"""Ranks in the group of a transfer."""
STALL_S = 10.0
"""Longest pause of a transfer: its sender, or its receiver, has stopped then."""
_PROTOCOL = 1
_LONGEST = 1 << 20
"""Bytes of a message; a file is named in about a hundred."""
_SMALLEST_PIECE, _LARGEST_PIECE = 1 << 16, 1 << 28
_HEX = set("0123456789abcdef")


class DirectError(ForageError):
    """The trainer did not send the files of a policy: they must be read."""


@dataclass(frozen=True)
class Request:
    """A transfer that an engine asks for. uid: 32 random hex digits; files: digest and bytes of each."""

    uid: str
    files: tuple[tuple[str, int], ...]

    def encode(self) -> bytes:
        """Encode the request as JSON."""
        return json.dumps({"protocol": _PROTOCOL, "uid": self.uid, "files": self.files}).encode()


@dataclass(frozen=True)
class Answer:
    """The trainer's answer. refused: why nothing is sent, or empty; piece_bytes: the size of a piece."""

    refused: str
    piece_bytes: int

    def encode(self) -> bytes:
        """Encode the answer as JSON."""
        return json.dumps({"protocol": _PROTOCOL, "refused": self.refused, "piece_bytes": self.piece_bytes}).encode()


def decode_request(data: bytes) -> Request:
    """Decode and check a request.

    Raises:
        ValueError: it is none.
    """
    fields = _decode(data)
    uid, files = fields.get("uid"), fields.get("files")
    if not isinstance(uid, str) or len(uid) != 32 or set(uid) - _HEX or not isinstance(files, list) or not files:
        raise ValueError("the request names no transfer or no files")
    for file in files:
        match file:
            case [str(), int(size)] if size >= 0:
                pass
            case _:
                raise ValueError(f"the request names the file {str(file)[:80]}: expected a digest and a size")
    return Request(uid, tuple((digest, size) for digest, size in files))


def decode_answer(data: bytes) -> Answer:
    """Decode and check an answer.

    Raises:
        ValueError: it is none.
    """
    fields = _decode(data)
    refused, piece = fields.get("refused"), fields.get("piece_bytes")
    if not isinstance(refused, str) or type(piece) is not int or not _SMALLEST_PIECE <= piece <= _LARGEST_PIECE:
        raise ValueError("the answer has no reason, or no pieces of a possible size")
    return Answer(refused, piece)


def name_answer(uid: str) -> str:
    """The key of the answer to a request."""
    return f"{uid}/answer"


def split_pieces(sizes: Sequence[int], piece_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield the pieces of files of these sizes in the order they are sent: file, offset and bytes of each."""
    for file, size in enumerate(sizes):
        for begin in range(0, size, piece_bytes):
            yield file, begin, min(piece_bytes, size - begin)


def _decode(data: bytes) -> dict[str, object]:
    if len(data) > _LONGEST:
        raise ValueError(f"a message of {len(data)} bytes: at most {_LONGEST} are read")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("a message that is no JSON") from None
    if not isinstance(fields, dict) or fields.get("protocol") != _PROTOCOL:
        raise ValueError(f"a message of another protocol than {_PROTOCOL}")
    return fields
