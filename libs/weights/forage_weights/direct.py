"""Messages of the direct transport: what an engine asks a sender for, the answer, and the pieces that follow.

An engine pushes a `TransferRequest` to the queue `REQUESTS` of the store that the announcement names. The sender sets
the key `name_answer(uid)` to an `Answer`. Where that says yes, both join a group of two under the key prefix `uid`,
the sender sends the files one after another, in the order of the request, in the pieces of `split_pieces`, and the
engine sets `name_end(uid)`. A sender that is busy may name an engine that has the files by now, which answers in the
same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from forage_runtime.errors import ForageError

REQUESTS = "forage/requests"
GLOO, NCCL = "gloo", "nccl"
SENDER, RECEIVER = 0, 1
"""Ranks in the group of a transfer."""
STALL_S = 10.0
"""Longest pause of a transfer: its sender, or its receiver, has stopped then."""
MOST_TRANSFERS = 8
"""Transfers of a sender at once: as many as a fast network card needs connections. The next engines ask others."""
_PROTOCOL = 2
_LONGEST = 1 << 20
"""Bytes of a message; a file is named in about a hundred."""
_SMALLEST_PIECE, _LARGEST_PIECE = 1 << 16, 1 << 28
_HEX = set("0123456789abcdef")
_ADDRESS = re.compile(r"[^:/\s]{1,255}:\d{1,5}")


class DirectError(ForageError):
    """The trainer did not send the files of a policy: they must be read."""


@dataclass(frozen=True)
class TransferRequest:
    """A transfer that an engine asks for.

    Attributes:
        uid: 32 random hex digits.
        files: digest and bytes of each.
        serves: "host:port" where the engine sends the files itself once it has them; empty: it does not.
        gpu: the device through which it could receive them with NCCL; empty: none.
        failed: engines that it was sent to before and that failed.
        is_done: nothing is asked for: one of those engines has sent the files.
    """

    uid: str
    files: tuple[tuple[str, int], ...]
    serves: str = ""
    gpu: str = ""
    failed: tuple[str, ...] = ()
    is_done: bool = False

    def encode(self) -> bytes:
        """Encode the request as JSON."""
        return _encode(asdict(self))


@dataclass(frozen=True)
class Answer:
    """The answer to a request.

    Attributes:
        refused: why these files are never sent; empty: they are, or may be later.
        is_busy: they are not sent now: ask `peer`, or again in a moment.
        peer: "host:port" of an engine that should have the files; empty: none.
        backend: what carries the pieces.
        piece_bytes: the size of a piece.
    """

    piece_bytes: int
    refused: str = ""
    is_busy: bool = False
    peer: str = ""
    backend: str = GLOO

    def encode(self) -> bytes:
        """Encode the answer as JSON."""
        return _encode(asdict(self))


def decode_request(data: bytes) -> TransferRequest:
    """Decode and check a request.

    Raises:
        ValueError: it is none.
    """
    match _decode(data):
        case {
            "uid": str(uid),
            "files": [_, *_] as files,
            "serves": str(serves),
            "gpu": str(gpu),
            "failed": [*failed],
            "is_done": bool(is_done),
        } if len(uid) == 32 and not set(uid) - _HEX:
            checked = tuple(map(_check_file, files))
            return TransferRequest(uid, checked, _check_address(serves), gpu, tuple(map(str, failed)), is_done)
    raise ValueError("the request lacks a field, or has one of another type")


def decode_answer(data: bytes) -> Answer:
    """Decode and check an answer.

    Raises:
        ValueError: it is none.
    """
    match _decode(data):
        case {
            "piece_bytes": int(piece),
            "refused": str(refused),
            "is_busy": bool(is_busy),
            "peer": str(peer),
            "backend": "gloo" | "nccl" as backend,
        } if _SMALLEST_PIECE <= piece <= _LARGEST_PIECE:
            return Answer(piece, refused, is_busy, _check_address(peer), backend)
    raise ValueError("the answer lacks a field, or has one of another type or size")


def name_answer(uid: str) -> str:
    """The key of the answer to a request."""
    return f"{uid}/answer"


def name_end(uid: str) -> str:
    """The key that an engine sets when it has received everything."""
    return f"{uid}/end"


def shorten_error(error: Exception) -> str:
    """The first line of an error of torch, whose message contains a trace of calls."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def split_pieces(sizes: Sequence[int], piece_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield the pieces of files of these sizes in the order they are sent: file, offset and bytes of each."""
    for file, size in enumerate(sizes):
        for begin in range(0, size, piece_bytes):
            yield file, begin, min(piece_bytes, size - begin)


def _check_file(file: object) -> tuple[str, int]:
    match file:
        case [str(digest), int(size)] if size >= 0:
            return digest, size
    raise ValueError(f"the request names the file {str(file)[:80]}: expected a digest and a size")


def _check_address(text: str) -> str:
    if text and not _ADDRESS.fullmatch(text):
        raise ValueError(f"the address {text[:80]!r} is no host:port")
    return text


def _encode(fields: dict[str, object]) -> bytes:
    return json.dumps({"protocol": _PROTOCOL} | fields).encode()


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
