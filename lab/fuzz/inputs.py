"""One hostile input, what became of it, and its file, from which it can be sent again."""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode, b64encode
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

_SHOWN = 400


class Fault(StrEnum):
    """What no input may do.

    CRASH: the process ended. ERROR: a status of 5xx other than 503, of gRPC UNKNOWN or INTERNAL, an exception that is
    no sentence for an operator, or a line of log that says so or is not JSON. HANG: no answer within the time limit.
    """

    CRASH = "crash"
    ERROR = "error"
    HANG = "hang"


@dataclass(frozen=True)
class Input:
    """One input.

    Attributes:
        call: the method of gRPC, `http`, `tcp` (bytes on a port of gRPC), a stream, or the reader of a file.
        parts: messages of a call, pieces of a request, or the content of a file.
        name: of the file that the content replaces, for readers of folders.
        complete: the server has all that it needs to answer, so it must.
        pause_s: between two pieces.
    """

    wire: str
    call: str
    parts: tuple[bytes, ...]
    name: str = ""
    complete: bool = True
    pause_s: float = 0.0

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))

    def with_parts(self, *parts: bytes) -> Input:
        return replace(self, parts=parts)

    def save(self, folder: Path, fault: Fault, detail: str) -> Path:
        """Write the input, with what it did, to a file of the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        row = {
            "wire": self.wire,
            "call": self.call,
            "name": self.name,
            "complete": self.complete,
            "pause_s": self.pause_s,
            "parts": [b64encode(part).decode() for part in self.parts],
            "fault": fault,
            "detail": detail[:2000],
            "shown": [repr(part[:_SHOWN])[2:-1] for part in self.parts[:8]],
        }
        digest = hashlib.sha256(b"\0".join(self.parts)).hexdigest()[:12]
        file = folder / f"{self.wire}-{fault}-{digest}.json"
        file.write_text(json.dumps(row, indent=1) + "\n")
        return file

    @classmethod
    def load(cls, file: Path) -> Input:
        """Read an input that `save` wrote."""
        row = json.loads(file.read_text(encoding="utf-8"))
        parts = tuple(b64decode(part) for part in row["parts"])
        return cls(row["wire"], row["call"], parts, row["name"], row["complete"], row["pause_s"])


@dataclass(frozen=True)
class Verdict:
    """What became of an input: its outcome, such as a status, and its fault, if it has one."""

    outcome: str
    fault: Fault | None = None
    detail: str = ""
