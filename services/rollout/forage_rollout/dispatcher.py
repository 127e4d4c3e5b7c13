"""Takes prompts off the stream, has them run, and writes their groups back, each exactly once.

A prompt stays pending until its group is written in the same transaction. While it is worked on it is kept alive;
entries of a worker that fell silent are reclaimed. Nothing here ends because Redis or an engine is away.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from forage_common.errors import UnavailableError
from forage_common.settings import Settings
from forage_common.streams.client import Entry, StreamClient
from forage_common.streams.prompt_identity import build_group, with_prompt_identity
from forage_common.telemetry import tracing
from forage_common.telemetry.logs import get_logger
from forage_common.telemetry.tracing import SpanKind
from forage_common.v1.trajectory_pb2 import Policy, Prompt, Status, Trajectory, TrajectoryGroup

log = get_logger()
T = TypeVar("T")
RunGroup = Callable[[Prompt], Awaitable[TrajectoryGroup]]
WaitForPolicy = Callable[[int, int, float], Awaitable[Policy | None]]
WaitForServices = Callable[[], Awaitable[None]]
BLOCK_S = 1.0
RETRY_S = 0.5
POLL_S = 0.1
POLICY_WAIT_S = 20.0
MAX_RUNS = 5
_FILL = 4  # trajectories in flight for each that an engine can run: many wait for a search or for their group's slowest


@dataclass
class DispatchCounts:
    """What a dispatcher has done since it started."""

    groups_in_flight: int = 0
    groups_done: int = 0
    groups_duplicated: int = 0
    groups_reclaimed: int = 0
    groups_released: int = 0
    groups_failed: int = 0
    runs_repeated: int = 0
    backpressure_seconds: float = 0.0
    redis_waits: int = 0
    restarts: int = 0


class Dispatcher:
    """One consumer of a run's prompts.

    Args:
        run_group: runs a prompt; raises when the engine fails, and is then called again.
        wait_for_policy: (version, epoch, seconds) → the oldest policy that an engine serves, waiting for that one at
            most so long; None where there is no engine in service.
        wait_for_services: returns once retriever and reward are ready. Awaited before the first prompt is taken,
            and again when a group came back with a trajectory that failed.
    """

    def __init__(
        self,
        settings: Settings,
        streams: StreamClient,
        run_group: RunGroup,
        wait_for_policy: WaitForPolicy,
        wait_for_services: WaitForServices,
    ) -> None:
        self._streams = streams
        self._run_group = run_group
        self._wait_for_policy = wait_for_policy
        self._wait_for_services = wait_for_services
        self._services_in_doubt = True
        rollout = settings.rollout
        self._most_groups = rollout.max_groups_in_flight
        self._most_trajectories = rollout.max_trajectories_in_flight or (
            _FILL * rollout.engine.max_num_seqs * rollout.engine_replicas.max
        )
        self._usual_samples = rollout.n
        self._reclaim_s = settings.redis.reclaim_idle_s / 2
        self._keep_alive_s = min(3.0, settings.redis.reclaim_idle_s / 3)
        # A group stays on the stream until the checkpoint that holds its step: twice what a working trainer leaves.
        trainer = settings.trainer
        self._largest_backlog = 2 * settings.data.train_batch_size * (trainer.save_freq + trainer.max_staleness + 1)
        self._consumer = f"rollout-{uuid.uuid4().hex[:12]}"
        self._held: dict[bytes, asyncio.Task[None]] = {}
        self._samples: dict[bytes, int] = {}
        # Engines only move on, and one that starts begins with what is announced: nobody needs to be asked again.
        self._reached = (0, -1)
        self._versions = not settings.rollout.engine.endpoint
        self._draining = False
        self.counts = DispatchCounts()

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            try:
                await self._redis(self._streams.create_groups)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._keep_alive())
                    tasks.create_task(self._reclaim())
                    tasks.create_task(self._take())
            except* Exception:  # protects the groups in flight from an answer of Redis that nobody foresaw
                self.counts.restarts += 1
                log.exception("dispatcher_restarts", held=len(self._held))
                await asyncio.sleep(RETRY_S)

    async def drain(self, timeout_s: float) -> int:
        """Take no more prompts and let the held ones end; the rest stays pending for another worker to reclaim.

        Returns:
            How many did not end within the time.
        """
        self._draining = True
        if self._held:
            await asyncio.wait(list(self._held.values()), timeout=timeout_s)
        left = list(self._held.values())
        for task in left:
            task.cancel()
        log.info("drained", groups_left=len(left))
        return len(left)

    def _free(self) -> int:
        """How many more groups may run, taking for granted that each has `rollout.n` samples."""
        if self._draining:
            return 0
        groups = (self._most_trajectories - sum(self._samples.values())) // self._usual_samples
        if not self._held:
            groups = max(1, groups)
        return min(self._most_groups - len(self._held), groups)

    async def _take(self) -> None:
        while not self._draining:
            if self._services_in_doubt:
                await self._wait_for_services()
                self._services_in_doubt = False
            free = self._free()
            if free <= 0:
                if self._held:
                    await asyncio.wait(list(self._held.values()), return_when=asyncio.FIRST_COMPLETED)
                continue
            if await self._redis(self._streams.count_backlog, self._streams.trajectories) >= self._largest_backlog:
                self.counts.backpressure_seconds += RETRY_S
                await asyncio.sleep(RETRY_S)
                continue
            for entry in await self._redis(self._streams.claim_prompts, self._consumer, free, BLOCK_S):
                self._start(entry)

    async def _reclaim(self) -> None:
        while not self._draining:
            free = 0 if self._services_in_doubt else self._free()
            if free > 0:
                for entry in await self._redis(self._streams.reclaim_prompts, self._consumer, free):
                    if entry.id not in self._held:
                        self.counts.groups_reclaimed += 1
                        self._start(entry)
            await asyncio.sleep(self._reclaim_s)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._keep_alive_s)
            await self._redis(self._streams.keep_alive, self._consumer, list(self._held))

    def _start(self, entry: Entry[Prompt]) -> None:
        if self._draining:
            return
        task = supervise(self._work(entry), entry.message.group_uid)
        self._held[entry.id] = task
        self._samples[entry.id] = entry.message.samples
        self.counts.groups_in_flight = len(self._held)
        task.add_done_callback(lambda _: self._drop(entry.id))

    def _drop(self, id: bytes) -> None:
        self._held.pop(id, None)
        self._samples.pop(id, None)
        self.counts.groups_in_flight = len(self._held)

    async def _work(self, entry: Entry[Prompt]) -> None:
        prompt = entry.message
        facts: tracing.Attributes = {
            "forage.group": prompt.group_uid,
            "forage.batch": prompt.batch,
            "forage.samples": prompt.samples,
            "forage.attempt": prompt.attempt,
        }
        with tracing.span("rollout.group", facts, kind=SpanKind.CONSUMER, parent=prompt.traceparent) as span:
            tracing.attach_trace_context(prompt, span)
            await self._finish(entry, span)

    async def _finish(self, entry: Entry[Prompt], span: tracing.Span) -> None:
        """Run a prompt and write its group, unless no engine can run it now."""
        prompt = entry.message
        if not await self._policy_reached(prompt):
            # Left pending: whoever reclaims it waits again, and prompts that can run come first.
            self.counts.groups_released += 1
            span.add_event("released", {"forage.min_policy_version": prompt.min_policy_version})
            log.warning("prompt_released", group=prompt.group_uid, min_policy_version=prompt.min_policy_version)
            return
        group = await self._run(prompt)
        if any(trajectory.status != Status.STATUS_OK for trajectory in group.trajectories):
            self._services_in_doubt = True
        with tracing.span("rollout.write", kind=SpanKind.PRODUCER) as writing:
            group.traceparent = tracing.traceparent(writing) or group.traceparent
            written = await self._redis(self._streams.finish, entry, group)
            writing.set_attributes({"forage.duplicate": not written})
        if written:
            self.counts.groups_done += 1
            log.info("group_done", group=group.group_uid, batch=group.batch, samples=len(group.trajectories))
        else:
            self.counts.groups_duplicated += 1
            log.info("group_was_done_elsewhere", group=group.group_uid, batch=group.batch)

    async def _policy_reached(self, prompt: Prompt) -> bool:
        if not self._versions:
            return True
        deadline = time.monotonic() + POLICY_WAIT_S
        while (left := deadline - time.monotonic()) > 0:
            announced = await self._redis(self._streams.read_policy)
            if announced is None:
                await asyncio.sleep(RETRY_S)
                continue
            version, epoch = prompt.min_policy_version, announced.epoch
            if self._reached >= (epoch, max(version, announced.version)):
                return True
            try:
                served = await self._wait_for_policy(version, epoch, min(left, 5.0))
            except Exception as error:  # noqa: BLE001 - protects the prompt from an engine that is starting again
                log.warning("waiting_for_engine", detail=str(error))
                await asyncio.sleep(RETRY_S)
                continue
            if served is not None and (served.epoch, served.version) >= (epoch, version):
                self._reached = max(self._reached, (served.epoch, served.version))
                return True
            await asyncio.sleep(POLL_S)
        return False

    async def _run(self, prompt: Prompt) -> TrajectoryGroup:
        detail = ""
        for attempt in range(MAX_RUNS):
            try:
                return await self._run_group(prompt)
            except Exception as error:  # noqa: BLE001 - protects the prompt from an engine that died under it
                detail = f"{type(error).__name__}: {error}"
                self.counts.runs_repeated += 1
                tracing.current_span().add_event("run_failed", {"forage.error": detail})
                log.warning("group_failed", group=prompt.group_uid, attempt=attempt, detail=detail)
                await asyncio.sleep(RETRY_S * 2**attempt)
        self.counts.groups_failed += 1
        return _given_up(prompt, f"given up after {MAX_RUNS} runs ({detail})")

    async def _redis(self, function: Callable[..., T], *args: Any) -> T:
        """Call the stream client off the event loop, for as long as it takes Redis to come back."""
        while True:
            try:
                return await asyncio.to_thread(function, *args)
            except UnavailableError as error:
                self.counts.redis_waits += 1
                tracing.current_span().add_event("redis_away")
                log.warning("waiting_for_redis", detail=str(error), held=len(self._held))
                await asyncio.sleep(RETRY_S)


def _given_up(prompt: Prompt, detail: str) -> TrajectoryGroup:
    failed = Trajectory(status=Status.STATUS_INTERNAL, status_detail=detail)
    return build_group(
        prompt, [with_prompt_identity(failed, prompt, sample) for sample in range(max(0, prompt.samples))]
    )


def supervise(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """A background task whose unexpected end is logged; keep the reference."""
    task = asyncio.create_task(work, name=name)

    def ended(done: asyncio.Task[None]) -> None:
        if not done.cancelled() and done.exception() is not None:
            log.error("task_failed", task=name, exc_info=done.exception())

    task.add_done_callback(ended)
    return task
