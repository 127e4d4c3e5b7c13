"""One `ScoreStream` call: reads items while it answers others, in the order in which they are scored.

At most a window of items is between reading a request and gRPC taking its reply, so a client that does not read its
replies stops its own stream and no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from forage_proto.v1 import reward_pb2
from forage_reward.serve.scoring import ScoringQueue
from forage_runtime.security.byte_budget import Place, RequestByteBudget

WINDOW = 128


class ScoreStream:
    """The state of one stream; its handler yields `iterate_replies()`."""

    def __init__(
        self,
        scoring: ScoringQueue,
        requests: AsyncIterator[reward_pb2.ScoreStreamRequest],
        room: RequestByteBudget,
        deadline: float,
    ) -> None:
        self._scoring = scoring
        self._room = room
        self._requests = requests
        self._deadline = deadline
        self._window = asyncio.Semaphore(WINDOW)
        self._replies: asyncio.Queue[reward_pb2.ScoreStreamResponse | None] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())

    async def iterate_replies(self) -> AsyncIterator[reward_pb2.ScoreStreamResponse]:
        while (reply := await self._replies.get()) is not None:
            yield reply
            self._window.release()
        await self._reading  # raises what ended the reading

    def cancel(self) -> None:
        """Stop reading and scoring."""
        self._reading.cancel()

    async def _read(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                async for request in self._requests:
                    await self._window.acquire()
                    await self._scoring.admission.enter(1)
                    place = await self._room.take(request.ByteSize(), None)
                    # One task per item, so that an item that waits delays no other.
                    task = tasks.create_task(self._answer(request))
                    task.add_done_callback(partial(self._release, place))
        finally:
            self._replies.put_nowait(None)

    def _release(self, place: Place, _: object) -> None:
        place.shrink(0)
        self._scoring.admission.leave(1)

    async def _answer(self, request: reward_pb2.ScoreStreamRequest) -> None:
        (reply,) = await self._scoring.score_batch([request.item], self._deadline)
        self._replies.put_nowait(reward_pb2.ScoreStreamResponse(id=request.id, item=reply))
