"""When no more prompts may be claimed: the stream of trajectories holds what the trainer has not acknowledged yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from forage_queue.streams.client import StreamClient
from forage_runtime.settings import Settings

Reason = Literal["groups", "bytes"]
REASONS: tuple[Reason, ...] = get_args(Reason)


@dataclass(frozen=True)
class Hold:
    """Why no prompt may be claimed now: the limit that was reached, and a sentence."""

    reason: Reason
    detail: str


class Backpressure:
    """The limits of one run's stream of trajectories, in groups and in bytes.

    The trainer acknowledges a group when the checkpoint of its step is durable. A working trainer leaves up to
    `train_batch_size * (save_freq + max_staleness + 1)` groups on the stream, and those of more steps while a
    checkpoint becomes durable; twice as many mean that it is down, and more groups would only fill Redis.

    The limit in bytes does not hold below the groups that the trainer needs before it can acknowledge any: a whole
    batch, and those of the batches that may be issued ahead. To hold then would be a deadlock.
    """

    def __init__(self, settings: Settings, streams: StreamClient) -> None:
        trainer, batch = settings.trainer, settings.data.train_batch_size
        self._streams = streams
        self._max_groups = 2 * batch * (trainer.save_freq + trainer.max_staleness + 1)
        self._needed_groups = batch * (trainer.max_staleness + 1)

    def find_hold(self) -> Hold | None:
        """Look at the stream; None where prompts may be claimed.

        Raises:
            UnavailableError: Redis cannot be asked now.
        """
        stream = self._streams.trajectories
        groups = self._streams.count_backlog(stream)
        if groups >= self._max_groups:
            return Hold(
                "groups", f"{groups} groups wait for the trainer, the limit is {self._max_groups}: is it running?"
            )
        if groups < self._needed_groups or not (limit := self._streams.read_byte_limit()):
            return None
        size = self._streams.measure_bytes(stream)
        if size < limit:
            return None
        return Hold(
            "bytes",
            f"{groups} groups that wait for the trainer take {size} bytes in Redis, the limit is {limit}: raise its "
            "maxmemory or redis.max_stream_bytes where this slows the training down",
        )
