"""One `ScoreStream`: reads items while it answers others, in the order in which scores are done.

At most a window of items is between reading and a reply that gRPC has taken, so a caller that does not read its
replies stops its own stream and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from forage_common.v1 import reward_pb2
from forage_reward.serve.scoring import Scoring

WINDOW = 128


class ScoreStream:
    """The life of one stream; `replies()` is what its handler yields."""

    def __init__(
        self, scoring: Scoring, requests: AsyncIterator[reward_pb2.ScoreStreamRequest], deadline: float
    ) -> None:
        self._scoring = scoring
        self._requests = requests
        self._deadline = deadline
        self._window = asyncio.Semaphore(WINDOW)
        self._done: asyncio.Queue[reward_pb2.ScoreStreamResponse | None] = asyncio.Queue()

        self._reading = asyncio.create_task(self._read())

    async def replies(self) -> AsyncIterator[reward_pb2.ScoreStreamResponse]:
        while (reply := await self._done.get()) is not None:
            yield reply
            self._window.release()
        await self._reading  # for what it may have raised

    def end(self) -> None:
        """Read and score no more."""
        self._reading.cancel()

    async def _read(self) -> None:
        try:
            async with asyncio.TaskGroup() as scoring:
                async for request in self._requests:
                    await self._window.acquire()
                    await self._scoring.admission.wait(1)
                    # A task of its own for each: one that waits holds up no other.
                    task = scoring.create_task(self._answer(request))
                    task.add_done_callback(lambda _: self._scoring.admission.leave(1))
        finally:
            self._done.put_nowait(None)

    async def _answer(self, request: reward_pb2.ScoreStreamRequest) -> None:
        (scored,) = await self._scoring.batch([request.item], self._deadline)
        self._done.put_nowait(reward_pb2.ScoreStreamResponse(id=request.id, item=scored))
