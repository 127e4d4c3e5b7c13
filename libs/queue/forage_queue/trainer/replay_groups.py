"""The groups of steps whose checkpoint is not old yet, as files, so that a damaged checkpoint costs no run.

Redis forgets the groups of a step once the step's checkpoint is durable. If that checkpoint turns out to be damaged,
the run goes back to the one before it and takes the steps between the two again, with the same groups from these files.

Layout of `<run folder>/checkpoints/groups/`: `packed_<n>.<sha256>`, length-prefixed PackedGroup messages, as they were
on the stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from google.protobuf.proto import parse_length_prefixed, serialize_length_prefixed

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_queue.streams.client import Entry
from forage_queue.trainer.batcher import Batch
from forage_runtime.errors import DataError
from forage_runtime.files import durable
from forage_runtime.files.folders import remove_leftovers
from forage_trajectory.codec import decode_group

_PREFIX = "packed_"


class ReplayGroups:
    """The files of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)

    def write(self, batch: Batch) -> None:
        """Write the groups of a step durably, before they are acknowledged."""
        digest = hashlib.sha256()
        for part in _frame(batch):
            digest.update(part)
        target = self._folder / f"{_PREFIX}{batch.number}.{digest.hexdigest()}"
        with durable.stage_file(target) as partial, partial.open("wb") as file:
            file.writelines(_frame(batch))
        for other in self._list(batch.number):
            if other != target:  # of a process that took the step before and lost it
                other.unlink()

    def has(self, steps: range) -> bool:
        """Whether the groups of all these steps are here."""
        return all(self._list(step) for step in steps)

    def read(self, step: int) -> Batch:
        """Read the groups of a step.

        Raises:
            DataError: they are not here, or damaged.
        """
        files = self._list(step)
        if not files:
            raise DataError(f"{self._folder} has no groups of step {step}")
        data = files[0].read_bytes()
        if hashlib.sha256(data).hexdigest() != files[0].suffix[1:]:
            raise DataError(f"{files[0]} is damaged: give another run.id")
        content, groups = BytesIO(data), []
        while (found := parse_length_prefixed(PackedGroup, content)) is not None:
            groups.append(decode_group(found))
        return Batch(step, tuple(Entry(b"", group) for group in groups), stale=0)

    def prune(self, step: int) -> None:
        """Delete the groups up to a step, that of the oldest checkpoint that the run may go back to."""
        for file in self._folder.glob(f"{_PREFIX}*"):
            if int(file.name.removeprefix(_PREFIX).partition(".")[0]) <= step:
                file.unlink()

    def _list(self, step: int) -> list[Path]:
        return list(self._folder.glob(f"{_PREFIX}{step}.*"))


def _frame(batch: Batch) -> Iterator[bytes]:
    for group in batch.groups:
        content = BytesIO()
        serialize_length_prefixed(group.read_packed(), content)
        yield content.getvalue()
