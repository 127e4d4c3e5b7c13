"""The gRPC server of one process: scores batches and streams, describes the rewards, and drains on request.

Calls wait in a bounded, fair queue with deadlines, which reports every score to metrics, canaries and the shadow. All
of it runs on one event loop. Scoring is pure Python, so threads would only take turns under the interpreter lock; a
long batch yields to other calls after every few items instead. Blocking rewards wait on threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import grpc
import uvloop
from prometheus_client import Counter, generate_latest

from forage_proto.v1 import reward_pb2, reward_pb2_grpc
from forage_reward.deadline import DEADLINE, compute_deadline
from forage_reward.explanation import write_explanation
from forage_reward.isolation.user_rewards import UserRewards
from forage_reward.registry import REWARDS
from forage_reward.router import RewardRouter
from forage_reward.score import Status, withhold_score
from forage_reward.serve.canaries import Canary, find_canaries
from forage_reward.serve.describe import describe_rewards
from forage_reward.serve.metrics import QUEUE, REFUSED, REQUESTS, SECONDS, ScoreTally
from forage_reward.serve.peer_workers import MIN_SHARED_ITEMS, PeerWorkers, WorkerAddress
from forage_reward.serve.shadow import ShadowScorer
from forage_reward.trajectory import GroundTruth, TrajectoryView
from forage_reward.wire import InvalidItemError, from_proto, read_truth, read_view, to_proto
from forage_runtime.addresses import bind
from forage_runtime.security.byte_budget import RequestByteBudget, Reservation
from forage_runtime.security.call_guard import CallGuard
from forage_runtime.security.call_limits import guard_calls, limit_connections
from forage_runtime.security.tls import make_grpc_server_credentials
from forage_runtime.security.token_file import open_token_file
from forage_runtime.settings import RewardSettings, Settings
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.grpc_probes import GrpcProbes
from forage_runtime.telemetry.log_sampling import LogSampler
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.tracing import SpanKind
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
MAX_MESSAGE_BYTES = 32 * 2**20
"""Of a request or reply: a thousand long trajectories. Clients split what is larger."""

MAX_BYTES_IN_PROGRESS = 128 * 2**20
"""Of all requests of a process; further ones wait unread, and are refused after a while."""

MAX_CONCURRENT_CALLS = 256
"""Further calls end with RESOURCE_EXHAUSTED, and clients retry them later."""

MAX_STREAMS = 32
DRAIN_S = 20.0
SERVICE = reward_pb2.DESCRIPTOR.services_by_name["Reward"].full_name
WINDOW = 128


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


class RewardServicer(reward_pb2_grpc.RewardServicer):
    """`forage.v1.Reward` over a scoring queue."""

    def __init__(self, scoring: ScoringQueue, description: reward_pb2.DescribeResponse) -> None:
        self._scoring = scoring
        self._description = description
        self._streams = 0
        self.budget = RequestByteBudget(MAX_BYTES_IN_PROGRESS, MAX_MESSAGE_BYTES)

    async def Score(
        self, request: reward_pb2.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ScoreResponse:
        REQUESTS.labels("Score").inc()
        try:
            with (
                _open_span("Score", context, {"forage.items": len(request.items)}),
                SECONDS.time(),
                self._scoring.admission.hold(len(request.items)),
            ):
                items = await self._scoring.score_batch(request.items, compute_deadline(context.time_remaining()))
        except QueueFullError as error:
            await _refuse(context, "Score", str(error))
        return reward_pb2.ScoreResponse(items=items)

    async def ScoreStream(
        self, request_iterator: AsyncIterator[reward_pb2.ScoreStreamRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[reward_pb2.ScoreStreamResponse]:
        REQUESTS.labels("ScoreStream").inc()
        if self._streams >= MAX_STREAMS:
            await _refuse(context, "ScoreStream", f"{MAX_STREAMS} streams are open: try again later")
        stream = ScoreStream(self._scoring, request_iterator, self.budget, compute_deadline(context.time_remaining()))
        self._streams += 1

        def release(_: object) -> None:
            self._streams -= 1
            stream.cancel()

        context.add_done_callback(release)
        with _open_span("ScoreStream", context, active=False):
            async for reply in stream.iterate_replies():
                yield reply

    async def Describe(
        self, request: reward_pb2.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.DescribeResponse:
        REQUESTS.labels("Describe").inc()
        if not request.name:
            return self._description
        rewards = [reward for reward in self._description.rewards if reward.name == request.name]
        if not rewards:
            known = ", ".join(reward.name for reward in self._description.rewards)
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no reward is called '{request.name}': known are {known}")
        everything = self._description
        return reward_pb2.DescribeResponse(
            rewards=rewards, version=everything.version, config_digest=everything.config_digest
        )

    async def Explain(
        self, request: reward_pb2.ExplainRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ExplainResponse:
        REQUESTS.labels("Explain").inc()
        try:
            view, truth = read_view(request.item), read_truth(request.item)
        except InvalidItemError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("unreachable: abort raises") from None
        # On a thread: a long text takes a while, and scores do not wait for it.
        text = await asyncio.to_thread(write_explanation, view, truth, from_proto(request.score))
        return reward_pb2.ExplainResponse(text=text)


def _open_span(
    method: str, context: grpc.aio.ServicerContext, attributes: tracing.Attributes | None = None, active: bool = True
) -> AbstractContextManager[tracing.Span]:
    attributes = {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": method, **(attributes or {})}
    parent = tracing.read_trace_context(context)
    return tracing.span(f"{SERVICE}/{method}", attributes, kind=SpanKind.SERVER, parent=parent, active=active)


async def _refuse(context: grpc.aio.ServicerContext, method: str, detail: str) -> NoReturn:
    REFUSED.labels(method).inc()
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, detail)
    raise AssertionError("unreachable: abort raises")


class Server:
    """A serving process, from `listen` to `drain`. Its event loop runs on its own thread.

    Args:
        address: that of one of several workers, which share long batches.

    Raises:
        UserError: a route or a user reward is wrong.
    """

    def __init__(self, settings: Settings, address: WorkerAddress | None = None) -> None:
        reward = settings.reward
        self._user = UserRewards(reward.user, REWARDS, settings.security.user_code)
        try:
            router = RewardRouter(reward.routes, self._user.rewards)
            self._peers = PeerWorkers(address) if address else None
            self._scoring = ScoringQueue(router, ShadowScorer(settings), reward, self._peers)
        except BaseException:
            self._user.close()
            raise
        self._servicer = RewardServicer(self._scoring, describe_rewards(router.rewards, reward))
        self._settings = settings
        self._loop = uvloop.new_event_loop()

    def listen(self) -> Server:
        """Start to serve; a worker shares its port with its peers.

        Raises:
            UserError: the port is in use, or a file with a certificate or tokens is wrong.
        """
        threading.Thread(target=self._loop.run_forever, name="serve", daemon=True).start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:
            self._close()
            raise
        # Objects of the start live as long as the process: scanning them in every full collection would delay calls.
        gc.collect()
        gc.freeze()
        return self

    def metrics(self) -> bytes:
        """Render the metrics for Prometheus."""
        return generate_latest()

    def drain(self, grace_s: float = DRAIN_S) -> None:
        """Refuse new calls, finish those in progress, end the processes of user and shadow rewards."""

        async def stop() -> None:
            await self._probes.begin_shutdown()
            await asyncio.gather(*(server.stop(grace_s) for server in self._servers))

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result()
        self._close()

    async def _start(self) -> None:
        server, self._probes = await _start_grpc(self._settings, self._servicer, self._peers is not None)
        self._servers = [server]
        if self._peers is not None:
            self._servers.append(await self._peers.serve(self._scoring))

    def _close(self) -> None:
        self._scoring.close()
        self._user.close()


async def _start_grpc(settings: Settings, servicer: RewardServicer, shared: bool) -> tuple[grpc.aio.Server, GrpcProbes]:
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.so_reuseport", int(shared)),  # otherwise a second service would share the port unnoticed
        *limit_connections(),
    ]
    credentials = make_grpc_server_credentials(settings.tls, "reward")
    tokens = open_token_file(settings.reward.auth_token_file, "reward.auth_token_file")
    interceptors = (*guard_calls(tokens, servicer.budget, "reward/grpc", MAX_CONCURRENT_CALLS), CallGuard())
    server = grpc.aio.server(options=options, interceptors=interceptors)
    reward_pb2_grpc.add_RewardServicer_to_server(servicer, server)
    probes = GrpcProbes(server, SERVICE)
    bind(server, settings.reward.grpc_address, credentials)
    await server.start()
    await probes.set_serving(True)
    return server, probes


class ScoreStream:
    """One `ScoreStream` call: reads items while it answers others, in the order in which they are scored.

    At most a window of items is between reading a request and gRPC taking its reply, so a client that does not read its
    replies stops its own stream and no other. The call's handler yields `iterate_replies()`.
    """

    def __init__(
        self,
        scoring: ScoringQueue,
        requests: AsyncIterator[reward_pb2.ScoreStreamRequest],
        budget: RequestByteBudget,
        deadline: float,
    ) -> None:
        self._scoring = scoring
        self._budget = budget
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
                    reservation = await self._budget.take(request.ByteSize(), None)
                    # One task per item, so that an item that waits delays no other.
                    task = tasks.create_task(self._answer(request))
                    task.add_done_callback(partial(self._release, reservation))
        finally:
            self._replies.put_nowait(None)

    def _release(self, reservation: Reservation, _: object) -> None:
        reservation.shrink(0)
        self._scoring.admission.leave(1)

    async def _answer(self, request: reward_pb2.ScoreStreamRequest) -> None:
        (reply,) = await self._scoring.score_batch([request.item], self._deadline)
        self._replies.put_nowait(reward_pb2.ScoreStreamResponse(id=request.id, item=reply))
