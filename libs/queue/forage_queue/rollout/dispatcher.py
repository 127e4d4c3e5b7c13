"""Claims prompts from the stream, runs them, and writes their groups to the stream of trajectories.

Each group is written exactly once, whichever worker dies when:

- A claimed prompt stays pending in Redis until `finish` acknowledges it in the transaction that writes its group. There
  is no moment at which a prompt is acknowledged and its group is not on the stream.
- A dispatcher takes over at once what an earlier process of the same worker, which had the same name, left pending.
- While a prompt is worked on, `keep_alive` resets its idle time. A worker that dies stops doing so, and another worker
  reclaims its prompts after `redis.reclaim_idle_s`.
- A worker that was only slow may finish a prompt that another has reclaimed. `finish` writes the group of the first and
  tells the second that it was a duplicate.

An unavailable Redis, engine, retriever or reward delays the work and never ends it. A finished group stays in memory,
and its prompt claimed, until Redis takes it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_proto.v1.trajectory_pb2 import Policy, Prompt, Replica, Status, Trajectory
from forage_queue.rollout.backpressure import Backpressure, Hold
from forage_queue.rollout.concurrency import AskCounts, Concurrency, GroupLimit, count_most_trajectories
from forage_queue.rollout.redis_threads import call_in_thread
from forage_queue.streams.client import LIVELY_S, NEVER, SERVED, Entry, StreamClient
from forage_queue.streams.prompt_identity import build_group, with_prompt_identity
from forage_runtime.background import supervise
from forage_runtime.errors import ForageError, UnavailableError
from forage_runtime.settings import Settings
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.tracing import SpanKind
from forage_runtime.telemetry.waits import Wait, idling, waiting
from forage_trajectory.codec import pack_group, unpack_facts

log = get_logger()
AskEngines = Callable[[], Awaitable[Mapping[str, Replica]]]
"""Asks the engines that run: the name of each → what it serves and refuses."""
CallRedis = Callable[..., Awaitable[Any]]
WATCH_S = 5.0
"""The state is read after each change, and after so long in case that a change was missed."""
PACE_S = 0.02
"""Between two reads: the changes of many engines that come at once are read together."""
DOUBT_S = 1.0
MAX_DOUBT_S = 4.0
ASK_TIMEOUT_S = 5.0
NOT_REACHED = -1
T = TypeVar("T")
RunGroup = Callable[[Prompt], Awaitable[PackedGroup]]
WaitForServices = Callable[[], Awaitable[None]]
BLOCK_S = 1.0
RETRY_INTERVAL_S = 0.5
MAX_RETRY_INTERVAL_S = 8.0
KEEP_ALIVE_S = 3.0
"""Between two signs of life of claimed prompts; more often where they are reclaimed early."""
POLICY_TIMEOUT_S = 20.0
MAX_RUNS = 5
MAX_SAMPLES = 1024
"""Most samples of a prompt."""
_WHY_GROUPS_END = (
    "each trajectory and each score has a time limit, from when a session has a worker, and Serve replaces an agent "
    "that does not answer"
)


class PolicyProgress:
    """What replicas say in Redis of the policies that they serve, which `watch` reads after each change.

    Engines themselves are asked only where one lags behind for longer than `DOUBT_S`, and before the first answer: it
    may have died, or left the service. An engine counts from when it was heard of in either way until it is found not
    to run, or gives no sign of life. One out of service gets no generations and holds nobody back.
    """

    def __init__(self, streams: StreamClient, call_redis: CallRedis, ask_engines: AskEngines) -> None:
        """
        Args:
            call_redis: calls a function of the client in a thread, repeatedly while Redis is unavailable.
        """
        self._streams = streams
        self._call_redis = call_redis
        self._ask_engines = ask_engines
        self._announced: Policy | None = None
        self._listed: Mapping[str, Replica] = {}
        self._running: Mapping[str, Replica] | None = None
        self._gone: Set[str] = frozenset()
        self._reached = NOT_REACHED
        self._read_at = self._asked_at = 0.0
        self._doubt_s = DOUBT_S
        self._reading = asyncio.Lock()
        self._changed = asyncio.Event()

    async def watch(self) -> NoReturn:
        """Read the state at each change, for as long as the dispatcher works."""
        seen = NEVER
        while True:
            try:
                seen = await self._call_redis(self._streams.await_change, SERVED, seen, WATCH_S)
                await self._read(time.monotonic())
            except ForageError as error:  # a server that refuses reads for a while ends no group
                log.warning("served_not_read", detail=str(error))
                await asyncio.sleep(DOUBT_S)  # wait: pause before another attempt
            await asyncio.sleep(PACE_S)  # wait: coalesces changes

    async def wait_until_served(self, version: int, timeout_s: float) -> bool:
        """Whether every engine in service has reached this version of the announced epoch, after waiting for it.

        Versions of two epochs cannot be compared, and the latest trainer counts: a policy of another epoch than the
        announced one counts as older, whatever its version.
        """
        began = time.monotonic()
        await self._read(began)
        while version > self._reached and (now := time.monotonic()) < began + timeout_s:
            due = max(began, self._asked_at) + self._doubt_s if self._asked_at else now
            if now >= due:
                await self._ask()
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.001, min(began + timeout_s, due) - now)):
                    await self._changed.wait()  # wait: named by the dispatcher
        return version <= self._reached

    async def _read(self, asked_at: float) -> None:
        """Return once the state was read after the given time, for all who asked before."""
        async with self._reading:
            if self._read_at >= asked_at:
                return
            began = time.monotonic()
            announced = await self._call_redis(self._streams.read_policy)
            listed = await self._call_redis(self._streams.read_replicas, LIVELY_S)
            if announced != self._announced:
                self._gone = frozenset()  # an engine that was starting when it was found not to run may be running now
            if announced != self._announced or listed.keys() - self._listed.keys():
                self._doubt_s = DOUBT_S
            self._announced, self._listed, self._read_at = announced, listed, began
            self._update()

    async def _ask(self) -> None:
        """Ask the engines that run; less and less often, since loading may take long."""
        self._asked_at, self._doubt_s = time.monotonic(), min(2 * self._doubt_s, MAX_DOUBT_S)
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                self._running = await self._ask_engines()
        except Exception as error:  # noqa: BLE001 - protects the prompt from an engine that is restarting
            log.warning("waiting_for_engine", detail=f"{type(error).__name__}: {error}")
        else:
            self._gone = self._listed.keys() - self._running.keys()
            self._update()

    def _update(self) -> None:
        """Find the version that every engine in service has reached, and wake the groups if it is another one."""
        before, self._reached = self._reached, NOT_REACHED
        if self._announced is not None and self._running is not None:
            listed = {name: one for name, one in self._listed.items() if name not in self._gone}
            served = [one.serving for one in {**self._running, **listed}.values() if not one.out_of_service]
            epoch = self._announced.epoch
            # A replica without a policy has one of epoch 0 here; a trainer's epochs begin at 1.
            self._reached = min((p.version if p.epoch == epoch else NOT_REACHED for p in served), default=NOT_REACHED)
        if self._reached != before:
            self._changed.set()
            self._changed = asyncio.Event()


@dataclass
class DispatchCounts:
    """Totals since a dispatcher started, and the groups in flight."""

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
    writes_repeated: int = 0


class Dispatcher:
    """One consumer of a run's prompts; several share them out.

    Attributes:
        limit: most groups in flight now, see `concurrency`.
        hold: why no prompts are claimed now although there is room for them; None while they are.

    Args:
        run_group: runs a prompt; raises when the engine fails, and is then called again.
        ask_engines: asks the engines that run what they serve; see `PolicyProgress`.
        consumer: name of this worker on the stream; another process has it only once this one has ended.
        wait_for_services: returns once retriever and reward are ready. Awaited before the first prompt is claimed, and
            again after a group with a failed trajectory: more prompts would only fail, too.
        ask_counts: asks the engines what they have to do; None: `rollout.max_groups_in_flight` is always the limit.
    """

    def __init__(
        self,
        settings: Settings,
        streams: StreamClient,
        consumer: str,
        run_group: RunGroup,
        ask_engines: AskEngines,
        wait_for_services: WaitForServices,
        ask_counts: AskCounts | None = None,
    ) -> None:
        self._streams = streams
        self._run_group = run_group
        self._served = PolicyProgress(streams, self._call_redis, ask_engines)
        self._wait_for_services = wait_for_services
        self._must_check_services = True
        rollout = settings.rollout
        self._most_claimed = rollout.max_groups_in_flight
        self._room = asyncio.Event()  # set when a group has ended, or more may run
        self._concurrency = Concurrency(rollout, ask_counts, self._room.set)
        self._max_trajectories = count_most_trajectories(rollout)
        self._samples_per_group = rollout.n
        self._environments = rollout.environment_names
        self._reclaim_s = settings.redis.reclaim_idle_s / 2
        self._keep_alive_s = min(KEEP_ALIVE_S, settings.redis.reclaim_idle_s / 3)
        self._backpressure = Backpressure(settings, streams)
        self._refusals: dict[str, str] = {}  # call of Redis → why it was refused last
        self._consumer = consumer
        self._claimed: dict[bytes, asyncio.Task[None]] = {}
        self._samples: dict[bytes, int] = {}
        self._trajectories = 0
        self._engines_load_policies = not settings.rollout.engine.endpoint
        self._draining = False
        self.hold: Hold | None = None
        self.counts = DispatchCounts()

    @property
    def limit(self) -> GroupLimit:
        return self._concurrency.limit

    @property
    def notes(self) -> dict[str, str]:
        """What holds the work up now: topic → sentence."""
        notes = {"backpressure": self.hold.detail} if self.hold is not None else {}
        if self._refusals:
            notes["writes"] = next(iter(self._refusals.values()))
        return notes

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            try:
                await self._call_redis(self._streams.create_groups)
                await self._call_redis(self._streams.declare_environments, self._environments)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._keep_alive())
                    tasks.create_task(self._reclaim())
                    tasks.create_task(self._claim())
                    tasks.create_task(self._concurrency.watch(lambda: len(self._claimed)))
                    if self._engines_load_policies:
                        tasks.create_task(self._served.watch())
            except* Exception:  # protects the groups in flight from an unforeseen error
                self.counts.restarts += 1
                log.exception("dispatcher_restarts", claimed=len(self._claimed))
                await asyncio.sleep(RETRY_INTERVAL_S)  # wait: pause before a restart

    async def drain(self, timeout_s: float) -> int:
        """Claim no more prompts and let the claimed ones end; the rest stay pending for another worker to reclaim.

        Returns:
            Number of prompts that did not end within the time.
        """
        self._draining = True
        self._room.set()
        if self._claimed:
            with waiting("the end of claimed groups", on="agent", limit_s=timeout_s, detail="draining"):
                await asyncio.wait(list(self._claimed.values()), timeout=timeout_s)
        left = list(self._claimed.values())
        for task in left:
            task.cancel()
        log.info("drained", groups_left=len(left))
        return len(left)

    def _count_free(self) -> int:
        """Number of groups that may be claimed, if each has `rollout.n` samples."""
        if self._draining:
            return 0
        groups = (self._max_trajectories - self._trajectories) // self._samples_per_group
        if not self._claimed:
            groups = max(1, groups)  # a group larger than the limit runs alone
        free = self.limit.groups - len(self._claimed)
        if free <= 0 < groups:
            self._concurrency.note_full()
        return min(free, groups)

    async def _claim(self) -> None:
        while not self._draining:
            if self._must_check_services:
                why = "without them groups would only fail"
                with waiting("ready services", on="retriever and reward", limit_s=None, why_unlimited=why):
                    await self._wait_for_services()
                self._must_check_services = False
                await self._take_over()
            free = self._count_free()
            if free <= 0:
                with waiting("room for another group", on="agent", limit_s=None, why_unlimited=_WHY_GROUPS_END):
                    self._room.clear()
                    await self._room.wait()
                continue
            if await self._is_held():
                await self._wait_for_the_trainer()
                continue
            with idling("prompts", on="trainer"):
                entries = await self._call_redis(self._streams.claim_prompts, self._consumer, free, BLOCK_S)
            for entry in entries:
                self._start(entry)

    async def _wait_for_the_trainer(self) -> None:
        why = "the trainer reads, or ends by itself"
        with waiting("room on the stream of groups", on="trainer", limit_s=None, why_unlimited=why) as wait:
            while not self._draining and self.hold is not None:
                wait.detail = self.hold.detail
                self.counts.backpressure_seconds += RETRY_INTERVAL_S
                await asyncio.sleep(RETRY_INTERVAL_S)
                await self._is_held()

    async def _take_over(self) -> None:
        """Run again what an earlier process under this name had claimed, without a wait for `redis.reclaim_idle_s`."""
        own = set(self._claimed)  # one of these may end before the answer that still names it is here
        found = await self._call_redis(self._streams.take_over_prompts, self._consumer, self._most_claimed)
        self._add([entry for entry in found if entry.id not in own])

    async def _is_held(self) -> bool:
        """Whether the stream of trajectories is full; logged when that begins and ends."""
        held = await self._call_redis(self._backpressure.find_hold)
        if held is not None and self.hold is None:
            log.warning("backpressure", reason=held.reason, detail=held.detail)
        elif held is None and self.hold is not None:
            log.info("backpressure_over", reason=self.hold.reason)
        self.hold = held
        return held is not None

    async def _reclaim(self) -> None:
        """Take over prompts whose worker stopped keeping them alive."""
        while not self._draining:
            free = 0 if self._must_check_services else self._count_free()
            if free > 0:
                self._add(await self._call_redis(self._streams.reclaim_prompts, self._consumer, free))
            await asyncio.sleep(self._reclaim_s)  # wait: pause between two looks

    def _add(self, entries: list[Entry[Prompt]]) -> None:
        for entry in entries:
            if entry.id not in self._claimed:  # our own: Redis was unavailable for longer than the idle time
                self.counts.groups_reclaimed += 1
                self._start(entry)

    async def _keep_alive(self) -> None:
        """Reset the idle time of claimed prompts, also while draining, so that no other worker reclaims them."""
        while True:
            await asyncio.sleep(self._keep_alive_s)  # wait: pause between two signs of life
            await self._call_redis(self._streams.keep_alive, self._consumer, list(self._claimed))
            try:
                await self._call_redis(self._streams.declare_environments, self._environments)
            except ForageError as error:  # claimed prompts stay alive whatever becomes of the declaration
                log.warning("environments_not_declared", detail=str(error))

    def _start(self, entry: Entry[Prompt]) -> None:
        if self._draining:
            return  # stays pending for another worker
        task = supervise(self._trace_group(entry), entry.message.group_uid)
        self._claimed[entry.id] = task
        self._samples[entry.id] = min(entry.message.samples, MAX_SAMPLES)
        self._trajectories += self._samples[entry.id]
        self.counts.groups_in_flight = len(self._claimed)
        task.add_done_callback(lambda _: self._forget(entry.id))

    def _forget(self, id: bytes) -> None:
        self._claimed.pop(id, None)
        self._trajectories -= self._samples.pop(id, 0)
        self.counts.groups_in_flight = len(self._claimed)
        self._room.set()

    async def _trace_group(self, entry: Entry[Prompt]) -> None:
        prompt = entry.message
        attributes: tracing.Attributes = {
            "forage.group": prompt.group_uid,
            "forage.batch": prompt.batch,
            "forage.samples": prompt.samples,
            "forage.attempt": prompt.attempt,
        }
        with tracing.span("rollout.group", attributes, kind=SpanKind.CONSUMER, parent=prompt.traceparent) as span:
            tracing.attach_trace_context(prompt, span)
            await self._process(entry, span)

    async def _process(self, entry: Entry[Prompt], span: tracing.Span) -> None:
        """Run a prompt and write its group, or release the prompt where its policy is not served in time."""
        prompt = entry.message
        if problem := self._find_problem(prompt):
            log.warning("prompt_rejected", group=prompt.group_uid, detail=problem)
            content = prompt.SerializeToString()
            await self._call_redis(self._streams.reject, self._streams.prompts, entry.id, content)
            return
        if not await self._wait_until_policy_served(prompt):
            # Not acknowledged and no longer kept alive: another worker reclaims it after the idle time, and prompts
            # that can run now come first.
            self.counts.groups_released += 1
            span.add_event("released", {"forage.min_policy_version": prompt.min_policy_version})
            log.warning("prompt_released", group=prompt.group_uid, min_policy_version=prompt.min_policy_version)
            return
        group = await self._run_with_retries(prompt)
        trajectories = unpack_facts(group).trajectories
        if any(trajectory.status != Status.STATUS_OK for trajectory in trajectories):
            self._must_check_services = True
        with tracing.span("rollout.write", kind=SpanKind.PRODUCER) as writing:
            group.head.traceparent = tracing.traceparent(writing) or group.head.traceparent
            written = await self._write(entry, group)
            writing.set_attributes({"forage.duplicate": not written})
        if written:
            self.counts.groups_done += 1
            log.info("group_done", group=prompt.group_uid, batch=prompt.batch, samples=len(trajectories))
        else:
            self.counts.groups_duplicated += 1
            log.info("group_was_done_elsewhere", group=prompt.group_uid, batch=prompt.batch)

    def _find_problem(self, prompt: Prompt) -> str:
        """Find why a prompt cannot be worked on whatever is tried; empty if it can. Not only trainers write prompts."""
        if not 0 <= prompt.samples <= MAX_SAMPLES:
            return f"samples is {prompt.samples}: expected at most {MAX_SAMPLES}"
        if not self._streams.is_reply_stream(prompt.reply_stream):
            return f"reply_stream is {prompt.reply_stream[:200]!r}: expected a stream of groups of this run"
        return ""

    async def _write(self, entry: Entry[Prompt], group: PackedGroup) -> bool:
        """Write the group and acknowledge its prompt in one transaction; False where another worker has written it.

        Repeated until Redis takes it, whatever the error: without its group the prompt would be generated again.
        """
        wait_s, uid = RETRY_INTERVAL_S, entry.message.group_uid
        why = "without its group the prompt would be generated again"
        with waiting("finished groups to be written", on="redis", limit_s=None, why_unlimited=why) as wait:
            while True:
                try:
                    written = await self._call_redis(self._streams.finish, entry, group)
                except Exception as error:  # noqa: BLE001 - protects a finished group from an error nobody thought of
                    self.counts.writes_repeated += 1
                    detail = f"{type(error).__name__}: {error}"
                    wait.detail = f"group {uid} cannot be written ({detail})"
                    self._refusals[uid] = wait.detail
                    log.error("group_not_written", group=uid, detail=detail, retry_s=wait_s)
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, MAX_RETRY_INTERVAL_S)
                else:
                    self._refusals.pop(uid, None)
                    return written

    async def _wait_until_policy_served(self, prompt: Prompt) -> bool:
        """Whether engines serve the prompt's `min_policy_version`, after waiting `POLICY_TIMEOUT_S` at most."""
        if not self._engines_load_policies:
            return True
        wanted = f"version {prompt.min_policy_version}"
        with waiting("the policy of a prompt", on="engine", limit_s=POLICY_TIMEOUT_S, detail=wanted):
            return await self._served.wait_until_served(prompt.min_policy_version, POLICY_TIMEOUT_S)

    async def _run_with_retries(self, prompt: Prompt) -> PackedGroup:
        """Run a prompt again while engines fail under it; after `MAX_RUNS` the group fails with a status."""
        detail = ""
        for attempt in range(MAX_RUNS):
            try:
                with waiting("groups that run", on="agent", limit_s=None, why_unlimited=_WHY_GROUPS_END):
                    return await self._run_group(prompt)
            except Exception as error:  # noqa: BLE001 - protects the prompt from an engine that died under it
                detail = f"{type(error).__name__}: {error}"
                self.counts.runs_repeated += 1
                tracing.current_span().add_event("run_failed", {"forage.error": detail})
                log.warning("group_failed", group=prompt.group_uid, attempt=attempt, detail=detail)
                await asyncio.sleep(RETRY_INTERVAL_S * 2**attempt)  # wait: pause before another run
        self.counts.groups_failed += 1
        return _build_failed_group(prompt, f"given up after {MAX_RUNS} runs ({detail})")

    async def _call_redis(self, function: Callable[..., T], *args: Any) -> T:
        """Call the stream client in a thread, repeatedly while Redis is unavailable: results in memory are not lost."""
        name = function.__name__
        with ExitStack() as waits:
            wait: Wait | None = None
            while True:
                try:
                    result = await call_in_thread(function, *args)
                except UnavailableError as error:
                    wait = wait or waits.enter_context(
                        waiting("calls of Redis", on="redis", limit_s=None, why_unlimited="results in memory are kept")
                    )
                    wait.detail = f"{name}: {error}"
                    self.counts.redis_waits += 1
                    self._refusals[name] = str(error)
                    tracing.current_span().add_event("redis_unavailable")
                    log.warning("waiting_for_redis", detail=str(error), claimed=len(self._claimed))
                    await asyncio.sleep(RETRY_INTERVAL_S)
                else:
                    self._refusals.pop(name, None)
                    return result


def _build_failed_group(prompt: Prompt, detail: str) -> PackedGroup:
    failed = Trajectory(status=Status.STATUS_INTERNAL, status_detail=detail)
    samples = [with_prompt_identity(failed, prompt, sample) for sample in range(max(0, prompt.samples))]
    return pack_group(build_group(prompt, samples))
