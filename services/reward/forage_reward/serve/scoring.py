"""A bounded, fair scoring queue with deadlines; it reports every score to metrics, canaries and the shadow.

All of it runs on one event loop. Scoring is pure Python, so threads would only take turns under the interpreter lock;
a long batch yields to other calls after every few items instead. Blocking rewards wait on threads.
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

from forage_proto.v1 import reward_pb2
from forage_reward.deadline import DEADLINE
from forage_reward.router import RewardRouter
from forage_reward.score import Status, withhold_score
from forage_reward.serve.canaries import Canary, find_canaries
from forage_reward.serve.metrics import QUEUE, ScoreTally
from forage_reward.serve.peer_workers import MIN_SHARED_ITEMS, PeerWorkers
from forage_reward.serve.shadow import ShadowScorer
from forage_reward.trajectory import GroundTruth, TrajectoryView
from forage_reward.wire import to_proto
from forage_runtime.settings import RewardSettings
from forage_runtime.telemetry.log_sampling import LogSampler
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import waiting

CANARIES = Counter(
    "forage_reward_canaries_total",
    "Trajectories with a pattern that suggests reward hacking",
    ["data_source", "canary"],
)
SHARED = Counter("forage_reward_shared_items_total", "Trajectories of long batches that another worker scored")
BLOCKING_THREADS = 32
"""Threads that wait for user rewards and judge models; waiting takes no CPU time."""

ITEMS_PER_SLICE = 16
"""Items (about 2 ms) after which a long batch yields to other calls."""

_EXCERPT = 200


class QueueFullError(Exception):
    """The queue holds as many trajectories as it may."""


MOST_IN_PROGRESS = 8192
"""Trajectories of a worker; further requests get RESOURCE_EXHAUSTED."""


class Admission:
    """Counts the queued trajectories and refuses those beyond a bound; an empty queue admits a batch of any size."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._queued = 0
        self._has_room = asyncio.Event()

    @contextmanager
    def hold(self, items: int) -> Iterator[None]:
        """Queue so many items for the duration of the context. Raises QueueFullError."""
        if not self._fits(items):
            raise QueueFullError(f"{self._queued} trajectories are queued, the limit is {self._bound}: send it later")
        self._enter(items)
        try:
            yield
        finally:
            self.leave(items)

    async def enter(self, items: int) -> None:
        """Wait until so many items fit, and queue them until `leave`."""
        while not self._fits(items):
            self._has_room.clear()
            await self._has_room.wait()  # wait: the stream's caller has a deadline
        self._enter(items)

    def leave(self, items: int) -> None:
        self._queued -= items
        QUEUE.dec(items)
        self._has_room.set()

    def _fits(self, items: int) -> bool:
        return not self._queued or self._queued + items <= self._bound

    def _enter(self, items: int) -> None:
        self._queued += items
        QUEUE.inc(items)


@dataclass(frozen=True)
class _Batch:
    """Items, their replies so far, and the time at which to stop (monotonic)."""

    items: Sequence[reward_pb2.ScoreItem]
    replies: list[reward_pb2.ScoredItem | None]
    deadline: float

    @classmethod
    def create(cls, items: Sequence[reward_pb2.ScoreItem], deadline: float) -> _Batch:
        return cls(items, [None] * len(items), deadline)


class ScoringQueue:
    """Scores items with a router; callers bound the queue by `admission`. All but `close` belongs to one event loop."""

    def __init__(
        self, router: RewardRouter, shadow: ShadowScorer, settings: RewardSettings, peers: PeerWorkers | None = None
    ) -> None:
        self.admission = Admission(MOST_IN_PROGRESS)
        self._router = router
        self._shadow = shadow
        self._peers = peers
        self._long_batches = asyncio.Lock()
        self._blocking = ThreadPoolExecutor(BLOCKING_THREADS, thread_name_prefix="blocking")
        self._sampler = LogSampler(per_minute=6)
        for source in settings.routes:
            for canary in Canary:
                CANARIES.labels(source, canary.value)  # so that a scrape shows 0 before the first event

    async def score_batch(self, items: Sequence[reward_pb2.ScoreItem], deadline: float) -> list[reward_pb2.ScoredItem]:
        """Return one reply per item, in order; items not scored by `deadline` (monotonic) have status TIMEOUT."""
        blocking = {index for index, item in enumerate(items) if self._router.is_blocking(item.data_source)}
        futures = {index: self._start_blocking(items[index], deadline) for index in sorted(blocking)}
        batch = _Batch.create(items, deadline)
        try:
            pure = [index for index in range(len(items)) if index not in blocking]
            if len(pure) <= ITEMS_PER_SLICE:
                await self._score_items(batch, pure)
            else:
                await self._score_long_batch(batch, pure)
            if futures:
                left_s = _seconds_until(deadline)
                why = "the caller gave no deadline; each reward has a limit" if left_s is None else ""
                with waiting("rewards of other processes", on="reward", limit_s=left_s, why_unlimited=why):
                    await asyncio.wait(futures.values(), timeout=left_s)
        finally:
            for index, future in futures.items():
                if future.done() and not future.cancelled():
                    batch.replies[index] = future.result()
                else:
                    future.cancel()
        return [reply or build_timeout_reply(item) for item, reply in zip(items, batch.replies, strict=True)]

    @property
    def is_busy(self) -> bool:
        """Whether a long batch is being scored."""
        return self._long_batches.locked()

    async def score_part(self, items: Sequence[reward_pb2.ScoreItem]) -> list[reward_pb2.ScoredItem]:
        """Score a part of a peer's batch, without blocking items; the peer counts them and keeps their deadline."""
        batch = _Batch.create(items, float("inf"))
        async with self._long_batches:
            await self._score_items(batch, range(len(items)))
        return [reply for reply in batch.replies if reply is not None]

    def close(self) -> None:
        """Start no more blocking items."""
        self._blocking.shutdown(wait=False, cancel_futures=True)
        self._shadow.close()

    def _start_blocking(self, item: reward_pb2.ScoreItem, deadline: float) -> asyncio.Future[reward_pb2.ScoredItem]:
        """Score a blocking item on a thread, in a context with the deadline of its call."""
        context = contextvars.copy_context()
        context.run(DEADLINE.set, deadline)
        return asyncio.get_running_loop().run_in_executor(self._blocking, context.run, self._score_blocking, item)

    def _score_blocking(self, item: reward_pb2.ScoreItem) -> reward_pb2.ScoredItem:
        tally = ScoreTally()
        reply = self._score(item, tally)
        tally.flush()
        return reply

    async def _score_long_batch(self, batch: _Batch, indices: Sequence[int]) -> None:
        # One long batch after the other: if they alternated, all would end as late as the last.
        was_idle = not self.is_busy
        try:
            # wait: for batches before this one, which have deadlines
            await asyncio.wait_for(self._long_batches.acquire(), _seconds_until(batch.deadline))
        except TimeoutError:
            return
        try:
            if was_idle and self._peers is not None and len(indices) >= MIN_SHARED_ITEMS:
                await self._share_batch(self._peers, batch, indices)
            else:
                await self._score_items(batch, indices)
        finally:
            self._long_batches.release()

    async def _share_batch(self, peers: PeerWorkers, batch: _Batch, indices: Sequence[int]) -> None:
        """Have each worker score an equal part; the part of a peer that does not answer is scored here."""
        parts = [indices[start :: len(peers) + 1] for start in range(len(peers) + 1)]
        requests = [
            peers.request_scores(number, [batch.items[index] for index in part], batch.deadline)
            for number, part in enumerate(parts[1:])
        ]
        try:
            await asyncio.sleep(
                0.001
            )  # so that the requests are sent before scoring occupies this loop  # wait: one turn of the event loop
            await self._score_items(batch, parts[0])
            for part, request in zip(parts[1:], requests, strict=True):
                replies = await request
                if len(replies) == len(part):
                    SHARED.inc(len(part))
                    for index, reply in zip(part, replies, strict=True):
                        batch.replies[index] = reply
                else:
                    await self._score_items(batch, part)
        finally:
            for request in requests:
                request.cancel()

    async def _score_items(self, batch: _Batch, indices: Sequence[int]) -> None:
        tally = ScoreTally()
        try:
            for count, index in enumerate(indices):
                if count and count % ITEMS_PER_SLICE == 0:
                    await asyncio.sleep(0)  # a cancelled call ends its batch here
                if time.monotonic() >= batch.deadline:
                    return
                batch.replies[index] = self._score(batch.items[index], tally)
        finally:
            tally.flush()

    def _score(self, item: reward_pb2.ScoreItem, tally: ScoreTally) -> reward_pb2.ScoredItem:
        source = item.data_source
        reply, score, inputs = self._router.score_with_inputs(item)
        has_route = self._router.has_route(source)
        tally.add_score(source if has_route else "", score)
        if inputs is not None:
            self._report_canaries(item, *inputs)
        if has_route:
            self._shadow.offer(item, score)
        return reply

    def _report_canaries(self, item: reward_pb2.ScoreItem, view: TrajectoryView, truth: GroundTruth) -> None:
        for canary in find_canaries(view, truth):
            CANARIES.labels(item.data_source, canary.value).inc()
            if self._sampler.admit(canary.value):
                get_logger().info(
                    "canary",
                    canary=canary.value,
                    trajectory=item.trajectory_id,
                    data_source=item.data_source,
                    end=view.assistant_part[-_EXCERPT:],
                )


def build_timeout_reply(item: reward_pb2.ScoreItem) -> reward_pb2.ScoredItem:
    """Build the reply for an item that was not scored before its call's deadline."""
    detail = "not reached before the deadline: send fewer, or wait longer"
    score = to_proto(withhold_score(Status.TIMEOUT, "", detail))
    tally = ScoreTally()
    tally.add_score("", score)
    tally.flush()
    return reward_pb2.ScoredItem(trajectory_id=item.trajectory_id, score=score, validation_score=score)


def _seconds_until(deadline: float) -> float | None:
    return max(0.0, deadline - time.monotonic()) if deadline < float("inf") else None
