"""Groups decoded on threads, beside a step: zstd and NumPy leave the interpreter to others for most of it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from google.protobuf.message import DecodeError

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_runtime.retries import DiskRetry
from forage_trajectory.codec import decode_group
from forage_trajectory.trajectory import ColumnFolder, Group

THREADS = 4


class GroupDecoder:
    """Decodes the groups that a client claims.

    folder: puts their columns where other ranks read them; None keeps them in memory.
    """

    def __init__(self, disk: DiskRetry) -> None:
        self.folder: ColumnFolder | None = None
        self._disk = disk
        self._threads = ThreadPoolExecutor(THREADS, "decode")

    def __call__(self, packed: Sequence[PackedGroup]) -> list[Group | DecodeError]:
        """Decode groups, each into a group or the error that says why it is none.

        Raises:
            DiskFullError: no room for the columns, for too long.
            Stopped: the process was asked to stop meanwhile.
        """
        if len(packed) < 2:
            return [self._decode(one) for one in packed]
        return list(self._threads.map(self._decode, packed))

    def _decode(self, packed: PackedGroup) -> Group | DecodeError:
        try:
            return self._disk(partial(decode_group, packed, self.folder))
        except DecodeError as error:
            return error
