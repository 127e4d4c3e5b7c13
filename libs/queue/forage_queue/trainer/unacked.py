"""Steps whose groups are consumed and not acknowledged yet."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import partial

from forage_proto.v1.trajectory_pb2 import LedgerEntry
from forage_queue.streams.client import StreamClient
from forage_queue.trainer.batcher import Batch
from forage_runtime.retries import RedisRetry


@dataclass(frozen=True)
class ConsumedGroup:
    """A group that was consumed by a step. entry: its id on the trajectories stream."""

    batch: int
    position: int
    attempt: int
    uid: str
    entry: str


@dataclass(frozen=True)
class ConsumedStep:
    """A step and the groups that it consumed.

    dropped: uids of the stragglers: groups that did not arrive in time. ends: batches that are over with the step.
    """

    step: int
    epoch: int
    groups: tuple[ConsumedGroup, ...]
    dropped: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()


class UnackedSteps:
    """Acknowledges the groups of steps once a durable checkpoint holds their effect on the weights.

    The order makes every group count exactly once. Before the checkpoint is durable, a crash loses the step, and its
    groups are still on the stream for the next process. After that, the groups are trained on: the checkpoint's
    manifest names them, so the next process acknowledges them even where this one died before it could.
    """

    def __init__(self, streams: StreamClient, retry: RedisRetry) -> None:
        self._streams = streams
        self._retry = retry
        self._pending: list[ConsumedStep] = []
        self._acknowledged: list[ConsumedStep] = []

    @property
    def steps(self) -> tuple[ConsumedStep, ...]:
        """The steps since the last acknowledgement, for the manifest of the next checkpoint."""
        return tuple(self._pending)

    def add(self, batch: Batch, epoch: int, dropped: tuple[str, ...]) -> None:
        """Add a step that was just taken.

        Args:
            dropped: uids of its stragglers.
        """
        groups = tuple(
            ConsumedGroup(g.batch, g.position, g.attempt, g.group_uid, entry.id.decode())
            for entry in batch.entries
            for g in [entry.message]
        )
        self._pending.append(ConsumedStep(batch.number, epoch, groups, dropped, batch.ends))

    def restore(self, consumed: Iterable[ConsumedStep], acknowledged: Container[int]) -> None:
        """Take over the steps of a checkpoint that are not in the ledger, which has the acknowledged ones."""
        self._pending = [step for step in consumed if step.step not in acknowledged]

    def acknowledge(self, until: int) -> list[bytes]:
        """Acknowledge the pending steps up to that of a durable checkpoint, and enter them in the ledger.

        Those of the call before are acknowledged again, which changes nothing unless the server lost that record.

        Returns:
            The ids of the entries that have left the stream.
        """
        acknowledged = []
        durable = [step for step in self._pending if step.step <= until]
        for step in [*self._acknowledged, *durable]:
            entry = LedgerEntry(
                step=step.step,
                group_uids=[group.uid for group in step.groups],
                epoch=step.epoch,
                acknowledged_unix_ms=int(time.time() * 1000),
                dropped_group_uids=step.dropped,
            )
            ids = [group.entry.encode() for group in step.groups]
            self._retry(partial(self._streams.acknowledge, entry, ids, step.ends))
            acknowledged += ids
        self._acknowledged, self._pending = durable, self._pending[len(durable) :]
        return acknowledged
