"""Steps are acknowledged twice: by the checkpoint that holds them, and by the next one, should the server forget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from forage_proto.v1.trajectory_pb2 import LedgerEntry
from forage_queue.streams.client import StreamClient
from forage_queue.trainer.batcher import Batch, UnackedSteps
from forage_runtime.retries import RedisRetry


class Streams:
    """Records which steps are acknowledged."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def acknowledge(self, ledger: LedgerEntry, ids: Sequence[bytes], ends: Sequence[int] | None) -> None:
        self.steps.append(ledger.step)


def call(function: Callable[[], Any]) -> Any:
    return function()


def test_an_acknowledgement_is_repeated_with_the_next_one() -> None:
    streams = Streams()
    pending = UnackedSteps(cast(StreamClient, streams), cast(RedisRetry, call))
    for step in (1, 2):
        pending.add(Batch(step, (), stale=0), epoch=1, dropped=())
        pending.acknowledge(until=step)
    assert streams.steps == [1, 1, 2]
    pending.acknowledge(until=2)
    assert streams.steps == [1, 1, 2, 2]
