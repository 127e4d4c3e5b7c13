"""Scores what calls bring: a bounded queue, everybody gets a turn, each in its time, and all are told who must know.

All of it runs on one event loop. Scoring is pure Python, so threads would only take turns under the interpreter lock;
a long batch gives way after every few items instead. Rewards that wait for something elsewhere do so on threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import Counter

from forage_common.settings import RewardSettings
from forage_common.telemetry.logs import get_logger
from forage_common.v1 import reward_pb2
from forage_reward.deadline import DEADLINE
from forage_reward.router import Judge
from forage_reward.score import Status, refused
from forage_reward.serve.canaries import Canary, canaries
from forage_reward.serve.metrics import QUEUE, Tally
from forage_reward.serve.peer_workers import SHARE_FROM, Siblings
from forage_reward.serve.sampling import Sampler
from forage_reward.serve.shadow import Shadow
from forage_reward.trajectory import GroundTruth, TrajectoryView
from forage_reward.wire import to_proto

CANARIES = Counter(
    "forage_reward_canaries_total",
    "Trajectories with a pattern that suggests a reward obtained by a trick",
    ["data_source", "canary"],
)
SHARED = Counter("forage_reward_shared_items_total", "Trajectories of long batches that another worker scored")
BLOCKING_THREADS = 32
"""That wait for user rewards and judges elsewhere; waiting costs no processor."""

SLICE = 16
"""Items, about 2 ms: a batch of more gives way to others after so many."""

_EXCERPT = 200


class QueueFullError(Exception):
    """More trajectories are in hand than may be."""


class Admission:
    """Counts the trajectories in hand and refuses those beyond a bound; a batch of any size fits an empty queue."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._held = 0
        self._left = asyncio.Event()

    @contextmanager
    def of(self, items: int) -> Iterator[None]:
        """Raises: QueueFullError."""
        if not self._fits(items):
            raise QueueFullError(f"{self._held} trajectories are in hand, allowed are {self._bound}: send it later")
        self._enter(items)
        try:
            yield
        finally:
            self.leave(items)

    async def wait(self, items: int) -> None:
        """Take room for so many as soon as there is some."""
        while not self._fits(items):
            self._left.clear()
            await self._left.wait()
        self._enter(items)

    def leave(self, items: int) -> None:
        self._held -= items
        QUEUE.dec(items)
        self._left.set()

    def _fits(self, items: int) -> bool:
        return not self._held or self._held + items <= self._bound

    def _enter(self, items: int) -> None:
        self._held += items
        QUEUE.inc(items)


@dataclass(frozen=True)
class _Batch:
    """Items, the scores that are there so far, and when to stop (monotonic)."""

    items: Sequence[reward_pb2.ScoreItem]
    found: list[reward_pb2.ScoredItem | None]
    deadline: float

    @classmethod
    def of(cls, items: Sequence[reward_pb2.ScoreItem], deadline: float) -> _Batch:
        return cls(items, [None] * len(items), deadline)


class Scoring:
    """The judge at work, behind `admission`. All but `close` belongs to one event loop."""

    def __init__(
        self, judge: Judge, shadow: Shadow, settings: RewardSettings, siblings: Siblings | None = None
    ) -> None:
        self.judge = judge
        self._siblings = siblings
        self.admission = Admission(settings.max_queue)
        self._shadow = shadow
        self._long_batches = asyncio.Lock()
        self._blocking = ThreadPoolExecutor(BLOCKING_THREADS, thread_name_prefix="blocking")
        self._sampler = Sampler(per_minute=6)
        for source in settings.routes:
            for canary in Canary:
                CANARIES.labels(source, canary.value)  # shown from the start, as 0

    async def batch(self, items: Sequence[reward_pb2.ScoreItem], deadline: float) -> list[reward_pb2.ScoredItem]:
        """One score an item, in order; what is not reached by `deadline` (monotonic) has status TIMEOUT."""
        blocking = {index for index, item in enumerate(items) if self.judge.blocking(item.data_source)}
        waiting = {index: self.start(items[index], deadline) for index in sorted(blocking)}
        batch = _Batch.of(items, deadline)
        try:
            own = [index for index in range(len(items)) if index not in blocking]
            if len(own) <= SLICE:
                await self._score_all(batch, own)
            else:
                await self._in_turn(batch, own)
            if waiting:
                await asyncio.wait(waiting.values(), timeout=_seconds_until(deadline))
        finally:
            for index, future in waiting.items():
                if future.done() and not future.cancelled():
                    batch.found[index] = future.result()
                else:
                    future.cancel()
        return [scored or unreached(item) for item, scored in zip(items, batch.found, strict=True)]

    @property
    def busy(self) -> bool:
        """Whether a long batch is being scored."""
        return self._long_batches.locked()

    async def score_part(self, items: Sequence[reward_pb2.ScoreItem]) -> list[reward_pb2.ScoredItem]:
        """A sibling's items, none of which blocks; the sibling counts them as in hand and knows their deadline."""
        batch = _Batch.of(items, float("inf"))
        async with self._long_batches:
            await self._score_all(batch, range(len(items)))
        return [scored for scored in batch.found if scored is not None]

    def start(self, item: reward_pb2.ScoreItem, deadline: float) -> asyncio.Future[reward_pb2.ScoredItem]:
        """Score a blocking item on a thread of its own, which knows the deadline."""
        context = contextvars.copy_context()
        context.run(DEADLINE.set, deadline)
        return asyncio.get_running_loop().run_in_executor(self._blocking, context.run, self.score, item)

    def score(self, item: reward_pb2.ScoreItem) -> reward_pb2.ScoredItem:
        """Score one item and tell metrics, canaries and shadow. Thread-safe."""
        tally = Tally()
        scored = self._score(item, tally)
        tally.tell()
        return scored

    def close(self) -> None:
        """Take no more blocking items."""
        self._blocking.shutdown(wait=False, cancel_futures=True)
        self._shadow.close()

    async def _in_turn(self, batch: _Batch, chosen: Sequence[int]) -> None:
        """One long batch after the other: side by side, all would end as late as the last."""
        idle = not self.busy
        try:
            await asyncio.wait_for(self._long_batches.acquire(), _seconds_until(batch.deadline))
        except TimeoutError:
            return
        try:
            if idle and self._siblings is not None and len(chosen) >= SHARE_FROM:
                await self._together(self._siblings, batch, chosen)
            else:
                await self._score_all(batch, chosen)
        finally:
            self._long_batches.release()

    async def _together(self, siblings: Siblings, batch: _Batch, chosen: Sequence[int]) -> None:
        """Each worker scores an equal part; what a sibling did not do is done here."""
        parts = [chosen[start :: len(siblings) + 1] for start in range(len(siblings) + 1)]
        asked = [
            siblings.ask(number, [batch.items[index] for index in part], batch.deadline)
            for number, part in enumerate(parts[1:])
        ]
        try:
            await asyncio.sleep(0.001)  # their parts leave before this loop is busy
            await self._score_all(batch, parts[0])
            for part, task in zip(parts[1:], asked, strict=True):
                scored = await task
                if len(scored) == len(part):
                    SHARED.inc(len(part))
                    for index, one in zip(part, scored, strict=True):
                        batch.found[index] = one
                else:
                    await self._score_all(batch, part)
        finally:
            for task in asked:
                task.cancel()

    async def _score_all(self, batch: _Batch, chosen: Sequence[int]) -> None:
        tally = Tally()
        try:
            for count, index in enumerate(chosen):
                if count and count % SLICE == 0:
                    await asyncio.sleep(0)  # a caller that has gone ends the batch here
                if time.monotonic() >= batch.deadline:
                    return
                batch.found[index] = self._score(batch.items[index], tally)
        finally:
            tally.tell()

    def _score(self, item: reward_pb2.ScoreItem, tally: Tally) -> reward_pb2.ScoredItem:
        source = item.data_source
        reply, score, seen = self.judge.judged(item)
        routed = self.judge.routed(source)
        tally.add(source if routed else "", score)
        if seen is not None:
            self._look_for_canaries(item, *seen)
        if routed:
            self._shadow.offer(item, score)
        return reply

    def _look_for_canaries(self, item: reward_pb2.ScoreItem, view: TrajectoryView, truth: GroundTruth) -> None:
        for canary in canaries(view, truth):
            CANARIES.labels(item.data_source, canary.value).inc()
            if self._sampler.take(canary.value):
                get_logger().info(
                    "canary",
                    canary=canary.value,
                    trajectory=item.trajectory_id,
                    data_source=item.data_source,
                    end=view.assistant_part[-_EXCERPT:],
                )


def unreached(item: reward_pb2.ScoreItem) -> reward_pb2.ScoredItem:
    """The reply for an item whose call ran out of time."""
    score = to_proto(refused(Status.TIMEOUT, "", "not reached before the deadline: send fewer, or wait longer"))
    tally = Tally()
    tally.add("", score)
    tally.tell()
    return reward_pb2.ScoredItem(trajectory_id=item.trajectory_id, score=score, validation_score=score)


def _seconds_until(deadline: float) -> float | None:
    return max(0.0, deadline - time.monotonic()) if deadline < float("inf") else None
