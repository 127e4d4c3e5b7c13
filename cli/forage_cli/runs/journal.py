"""Journal of finished items in an append-only file, so that long work can be interrupted and continued at any time.

A record is the length and the CRC-32 of a serialised message, four bytes each, little-endian, and the message.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from forage_runtime.errors import DataError, UserError

_HEAD = struct.Struct("<II")
M = TypeVar("M", bound=Message)


class Journal(Generic[M]):
    """File to which one process at a time appends; after `append` returns, the item survives kill -9 and a power cut.

    Example:
        with Journal(Path("journal.bin"), Trajectory) as journal:
            done = {trajectory.id for trajectory in journal.read()}
            journal.append(trajectory)
    """

    def __init__(self, path: Path, kind: type[M]) -> None:
        """Open or create the file, and truncate a record that was being written when its writer died.

        Raises:
            UserError: another process has it open.
            DataError: it cannot be written to, or is damaged.
        """
        self._path = path
        self._kind = kind
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            raise DataError(f"{path} cannot be written ({error.strerror or error}): choose another place") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end = max((end for _, end in self._records()), default=0)
            self._file.truncate(end)
        except BlockingIOError:
            self._file.close()
            raise UserError(f"{path} is being written by another process: wait for it, or end it") from None
        except BaseException:
            self._file.close()
            raise

    def append(self, message: M) -> None:
        """Append a message and wait until it is on disk."""
        record = message.SerializeToString()
        self._file.write(_HEAD.pack(len(record), zlib.crc32(record)) + record)
        self._file.flush()
        os.fdatasync(self._file.fileno())

    def read(self) -> Iterator[M]:
        """Iterate over all messages in the order in which they were appended.

        Raises:
            DataError: a record is no such message.
        """
        for record, end in self._records():
            try:
                yield self._kind.FromString(record)
            except DecodeError as error:
                raise self._damaged(end - len(record), str(error)) from None

    def close(self) -> None:
        """Close the file and release its lock."""
        self._file.close()

    def __enter__(self) -> Journal[M]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _records(self) -> Iterator[tuple[bytes, int]]:
        """Iterate over complete records and the positions of their ends."""
        with self._path.open("rb") as file:
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                length, checksum = _HEAD.unpack(head)
                record = file.read(length)
                if not length or len(record) < length:  # the rest had not reached the disk
                    return
                if zlib.crc32(record) != checksum:
                    raise self._damaged(file.tell() - length, "its checksum is wrong")
                yield record, file.tell()

    def _damaged(self, place: int, reason: str) -> DataError:
        return DataError(f"{self._path} is damaged at byte {place} ({reason}): remove it and start again")
