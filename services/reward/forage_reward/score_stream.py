"""One `ScoreStream`: reads items while it answers others, in the order in which scores are done.

At most a window of items is between reading and a reply that gRPC has taken, so a caller that does not read its
replies stops its own stream and nothing else.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future

import grpc

from forage_common.v1 import reward_pb2
from forage_reward.scoring import Scoring

WINDOW = 128
_ROOM_WAIT_S = 0.5


class ScoreStream:
    """The life of one stream; `replies()` is what its handler yields."""

    def __init__(
        self,
        scoring: Scoring,
        requests: Iterator[reward_pb2.ScoreStreamRequest],
        deadline: float,
        on_end: Callable[[Callable[[], None]], bool],
    ) -> None:
        self._scoring = scoring
        self._requests = requests
        self._deadline = deadline
        self._window = threading.Semaphore(WINDOW)
        self._done: queue.SimpleQueue[reward_pb2.ScoreStreamResponse | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open = 1  # the reader, and each item that has no reply yet
        self._failure: BaseException | None = None
        self._ended = not on_end(self._end)

    def replies(self) -> Iterator[reward_pb2.ScoreStreamResponse]:
        threading.Thread(target=self._read, name="stream", daemon=True).start()
        while (reply := self._done.get()) is not None:
            yield reply
            self._window.release()
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._done.put(None)

    def _end(self) -> None:
        self._ended = True
        self._window.release()  # the reader may wait for room that nobody will make
        self._done.put(None)

    def _read(self) -> None:
        try:
            for request in self._requests:
                self._window.acquire()
                while not self._ended and not self._scoring.admission.enter(1, _ROOM_WAIT_S):
                    continue  # the whole service is full: read no further
                if self._ended:
                    break
                self._begin(request)
        except grpc.RpcError:
            pass  # the caller has gone; nobody is left to tell
        except Exception as error:  # noqa: BLE001 - raised again where gRPC makes a status of it
            self._fail(error)
        finally:
            self._close_one()

    def _begin(self, request: reward_pb2.ScoreStreamRequest) -> None:
        with self._lock:
            self._open += 1
        if self._scoring.judge.blocking(request.item.data_source):
            future = self._scoring.start(request.item, self._deadline)
            future.add_done_callback(lambda done: self._reply(request.id, done))
        else:
            self._finish(request.id, self._scoring.one(request.item, self._deadline))

    def _reply(self, number: int, done: Future[reward_pb2.ScoredItem]) -> None:
        error = CancelledError() if done.cancelled() else done.exception()
        if error is None:
            self._finish(number, done.result())
        else:
            self._scoring.admission.leave(1)
            self._fail(error)

    def _finish(self, number: int, scored: reward_pb2.ScoredItem) -> None:
        self._scoring.admission.leave(1)
        self._done.put(reward_pb2.ScoreStreamResponse(id=number, item=scored))
        self._close_one()

    def _close_one(self) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                self._done.put(None)
