"""Answers of open validations, as files: so they can leave Redis before their validation ends.

Layout of `<run folder>/validation/answers/`: `<label>.<epoch>`, a line for each answer with the SHA-256 of a serialized
PackedGroup and its base64. Every trainer appends to the file of its own epoch, so one that was replaced and does
not know it yet cannot harm its successor's file.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from google.protobuf.message import DecodeError

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_runtime.files import durable
from forage_runtime.telemetry.logs import get_logger
from forage_trajectory.codec import decode_group
from forage_trajectory.trajectory import Group


class StoredAnswers:
    """The stored answers of one validation."""

    def __init__(self, folder: Path, label: str, epoch: int) -> None:
        """
        Args:
            folder: the folder of validations of the run.
            epoch: that of this trainer.
        """
        self._folder = folder / "answers"
        self._label = label
        self._file = self._folder / f"{label}.{epoch}"

    def read(self) -> Iterator[Group]:
        """Read what any trainer of the run has stored. Damaged lines are left out: their questions are asked again."""
        for file in self._list():
            for line in filter(None, file.read_bytes().split(b"\n")):
                digest, _, content = line.partition(b" ")
                try:
                    data = base64.b64decode(content, validate=True)
                    if hashlib.sha256(data).hexdigest().encode() != digest:
                        raise DecodeError("its digest is another")
                    group = decode_group(PackedGroup.FromString(data))
                except (ValueError, DecodeError) as error:
                    get_logger().warning("stored_answer_damaged", file=str(file), reason=str(error))
                else:
                    yield group

    def append(self, groups: Iterable[Group]) -> None:
        """Store answers durably, all or none.

        Raises:
            DiskFullError: there is no room.
        """
        lines = b"".join(_encode(group.read_packed().SerializeToString()) for group in groups)
        if not lines:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        durable.append(self._file, lines)

    def delete(self) -> None:
        """Delete what was stored, once the result of the validation is."""
        for file in self._list():
            file.unlink(missing_ok=True)

    def _list(self) -> list[Path]:
        return sorted(self._folder.glob(f"{self._label}.*"))


def _encode(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode() + b" " + base64.b64encode(data) + b"\n"
