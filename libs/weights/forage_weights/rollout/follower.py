"""Keeps an engine on the policy that the trainer announced last, and tells the run what it serves and refuses."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import NoReturn, Protocol

from forage_proto.v1.trajectory_pb2 import Policy, Replica, Shift
from forage_queue.rollout.lease_watch import LeaseWatch, is_same, name_shift
from forage_queue.rollout.redis_threads import call_in_thread
from forage_queue.streams import history
from forage_queue.streams.client import ANNOUNCED, LIVELY_S, NEVER, SERVED, StreamClient
from forage_runtime.errors import UnavailableError
from forage_runtime.security.audit import record_act
from forage_runtime.telemetry.logs import get_logger
from forage_weights.announcement import PolicyError, describe_policy
from forage_weights.rollout.policy import is_newer

log = get_logger()
POLL_INTERVAL_S = 0.1
"""Between two looks at the engine itself, which also loads what `UpdateWeights` asks for."""
WATCH_S = 5.0
"""The announced policy is read after each change, and after so long in case that a change was missed."""
GIVE_WAY_INTERVAL_S = 1.0
"""Between two looks for a newer policy while one is loaded."""
RETRY_INTERVAL_S = 1.0
MAX_RETRY_INTERVAL_S = 30.0
_RESTS = 9.0
"""Rest after a refused load, as a multiple of its time: one that starts vLLM again and again would do nothing else."""
HEARTBEAT_INTERVAL_S = 5.0
CATCH_UP_TIMEOUT_S = 60.0


def find_rest(retry_s: float, took_s: float) -> float:
    """Seconds between a refused load, which took so long, and the next attempt at the same policy.

    Args:
        retry_s: what the number of attempts asks for.
    """
    return max(retry_s, _RESTS * took_s)


class Engine(Protocol):
    """What a follower needs of an engine; `forage_rollout.engine.vllm_engine.VllmEngine` has it."""

    out_of_service: str
    """Why it refuses requests; empty: it serves."""

    @property
    def dtype(self) -> str: ...
    @property
    def serving(self) -> Policy | None: ...
    @property
    def difference(self) -> float | None: ...
    @property
    def is_asleep(self) -> bool: ...
    @property
    def drains(self) -> bool: ...

    async def load_policy(self, policy: Policy, allow_older: bool = False) -> float: ...
    async def fall_asleep(self) -> None: ...
    async def wake_weights(self) -> None: ...
    async def wake_up(self) -> None: ...


class _ReplacedError(Exception):
    """Another policy was announced while this one was made ready."""


class Follower:
    """Loads for an engine what is announced, and acknowledges it under the name of its replica.

    The trainer decides what is served: after a lost Redis volume its epochs may begin lower than what an engine serves.
    An announcement that stays the same does not replace what `UpdateWeights` has loaded meanwhile.

    A policy that cannot be loaded is refused: the engine serves the old one and tries again, ever more rarely, and the
    more rarely the longer an attempt takes. Once
    another engine serves the announced policy, this one goes out of service until it does, too: prompts that ask for
    the announced policy wait for every engine in service.

    Where the trainer shares the engine's GPUs, the engine sleeps in the trainer's shifts. It wakes in an order that
    never needs the memory of both: the weights, the announced policy into them, then the cache.
    """

    def __init__(
        self,
        streams: StreamClient,
        engine: Engine,
        name: str,
        lease_watch: LeaseWatch | None = None,
        audit_file: Path | None = None,
    ) -> None:
        self._streams = streams
        self._audit_file = audit_file
        self._lease_watch = lease_watch
        self._is_starting = lease_watch is not None  # and gives signs of life all the same, since it uses memory
        self._asleep: Shift | None = None
        self._engine = engine
        self._name = name
        self._last_status: Replica | None = None
        self._has_news = asyncio.Event()
        self._refused: Policy | None = None
        self._reason = ""
        self._kept: Policy | None = None
        """What the engine served when it refused: another one, loaded by hand, takes the place of the announced one."""
        self._withdrawn = ""
        """Why it is out of service although its engine is well; empty: it has not stepped aside."""
        self._gave_way = False

    def describe(self) -> Replica:
        """What the engine serves and refuses now."""
        is_refusing = self._refused is not None and self._engine.serving is self._kept
        return Replica(
            serving=self._engine.serving,
            refused=self._refused if is_refusing else None,
            reason=self._reason if is_refusing else "",
            out_of_service=self._is_starting or bool(self._engine.out_of_service),
            asleep=self._asleep,
            difference=self._engine.difference,
        )

    async def catch_up(self, timeout_s: float = CATCH_UP_TIMEOUT_S) -> None:
        """Return once the engine serves the announced policy and has said so, or none is announced.

        Whoever looks from then on sees this engine among the others, and what was announced before is served. A policy
        that cannot be loaded within `timeout_s` leaves the engine out of service; `follow` keeps trying.
        """
        reporting = asyncio.create_task(self._report_loop()) if self._lease_watch is not None else None
        try:
            await self._catch_up(time.monotonic() + timeout_s)
        finally:
            if reporting is not None:
                reporting.cancel()
                await asyncio.wait([reporting])  # wait: it was cancelled

    async def _catch_up(self, deadline: float) -> None:
        engine = self._engine
        while True:
            pause_s = 0.0
            try:
                if await self._is_trainers_shift():
                    await self._await_announcement(NEVER)
                    continue
                await call_in_thread(self._streams.declare_dtype, engine.dtype)
                announced = await call_in_thread(self._streams.read_policy)
                if announced not in (None, engine.serving) and not engine.out_of_service:
                    if not await self._try(announced):
                        pause_s = RETRY_INTERVAL_S
                        if time.monotonic() > deadline:
                            engine.out_of_service = self._reason
                elif self._last_status == self.describe() and not self._is_starting:
                    return
                else:
                    self._is_starting = False
                await self._report()
            except UnavailableError as error:
                log.warning("waiting_for_redis", detail=str(error))
                pause_s = RETRY_INTERVAL_S
            await asyncio.sleep(pause_s)  # wait: an engine that starts has no snapshot; its log says why

    async def follow(self) -> None:
        """Load each policy that is announced, and say what is served; never returns, survives an unavailable Redis."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._load_announced())
            # A task of its own: a load may wait for a long group, and a replica without heartbeats counts as gone.
            tasks.create_task(self._report_loop())

    async def _load_announced(self) -> NoReturn:
        seen = dict.fromkeys((ANNOUNCED, SERVED), NEVER)
        followed = self._engine.serving
        retry_at, retry_s = 0.0, RETRY_INTERVAL_S
        while True:
            try:
                if await self._is_trainers_shift():
                    seen[ANNOUNCED] = await self._await_announcement(seen[ANNOUNCED])
                    continue
                announced = await call_in_thread(self._streams.read_policy)
                if announced is not None and announced != followed:
                    if announced != self._refused:
                        retry_at, retry_s = 0.0, RETRY_INTERVAL_S
                    if announced == self._engine.serving or self._is_replaced(announced):
                        followed = announced
                    elif time.monotonic() >= retry_at:
                        began = time.monotonic()
                        if await self._try(announced):
                            followed = announced
                        else:
                            now = time.monotonic()
                            retry_at = now + find_rest(retry_s, now - began)
                            retry_s = min(2 * retry_s, MAX_RETRY_INTERVAL_S)
                stream, block_s = ANNOUNCED, WATCH_S
                if announced is not None and announced == self.describe().refused:
                    await self._withdraw(announced)
                    stream, block_s = SERVED, max(0.01, min(WATCH_S, retry_at - time.monotonic()))
                # wait: for a change, at most so long
                seen[stream] = await call_in_thread(self._streams.await_change, stream, seen[stream], block_s)
            except UnavailableError as error:
                log.warning("waiting_for_redis", detail=str(error))
                await asyncio.sleep(RETRY_INTERVAL_S)  # wait: the main process names Redis

    async def _is_trainers_shift(self) -> bool:
        """Put the engine to sleep, or wake it, as the shift at its GPUs says; False where it may compute."""
        if self._lease_watch is None:
            return False
        shift = await self._lease_watch.read_trainers()
        if shift is None:
            if self._engine.is_asleep:
                await self._wake_up()
            return False
        if self._asleep is None or not is_same(shift, self._asleep):
            await self._engine.fall_asleep()
            self._asleep = name_shift(shift)
            self._has_news.set()
        return True

    async def _wake_up(self) -> None:
        self._asleep = None
        self._has_news.set()
        await self._engine.wake_weights()
        if not self._engine.drains:  # groups that must end first cannot while there is no cache
            announced = await call_in_thread(self._streams.read_policy)
            if announced not in (None, self._engine.serving):
                await self._try(announced)
        try:
            await self._engine.wake_up()
        except PolicyError as error:  # what was put in place without a cache could only be checked now
            if self._engine.serving is not None:
                self._refuse(self._engine.serving, error, self._engine.serving)

    async def _await_announcement(self, seen: bytes) -> bytes:
        # wait: for the end of the trainer's shift, which has a time limit
        return await call_in_thread(self._streams.await_change, ANNOUNCED, seen, WATCH_S)

    def _is_replaced(self, announced: Policy) -> bool:
        """Whether `UpdateWeights` has loaded another policy since the announced one was refused."""
        return announced == self._refused and self._engine.serving is not self._kept

    async def _try(self, announced: Policy) -> bool:
        """Load a policy; False if it is refused, or another one was announced before this one was ready."""
        before = self._engine.serving
        try:
            with self._record("load", announced):
                await self._load(announced)
        except _ReplacedError:
            log.info("policy_skipped", policy=describe_policy(announced))
            return False
        except PolicyError as error:
            self._refuse(announced, error, before)
            return False
        else:
            self._withdrawn = ""
            if before is not None and not is_newer(announced, before):
                log.warning("older_policy_loaded", announced=describe_policy(announced), before=describe_policy(before))
            return True
        finally:
            self._has_news.set()

    def _refuse(self, policy: Policy, error: PolicyError, kept: Policy | None) -> None:
        if policy != self._refused:  # log each refused policy once, not at each attempt
            log.error("policy_refused", detail=str(error))
            which = {"version": policy.version, "epoch": policy.epoch, "uri": policy.uri}
            record_act("refuse_policy", self._name, self._audit_file, **which, reason=str(error))
        self._refused, self._reason, self._kept = policy, str(error), kept

    async def _load(self, announced: Policy) -> None:
        """Load a policy, unless another one is announced before it is served. The next one is loaded in any case.

        The trainer's shift ends a load, too.

        Raises:
            PolicyError: it cannot be loaded.
        """
        may_give_way, self._gave_way = not self._gave_way, False
        loading = asyncio.ensure_future(self._engine.load_policy(announced, allow_older=True))
        try:
            while not (await asyncio.wait([loading], timeout=GIVE_WAY_INTERVAL_S))[0]:  # wait: named by the engine
                with suppress(UnavailableError):
                    if self._lease_watch is not None and await self._lease_watch.read_trainers() is not None:
                        loading.cancel()
                    newest = await call_in_thread(self._streams.read_policy)
                    if may_give_way and newest not in (None, announced):
                        self._gave_way = loading.cancel()
            if loading.cancelled() and self._engine.serving != announced:
                raise _ReplacedError
            if not loading.cancelled():
                loading.result()
        finally:
            loading.cancel()

    async def _withdraw(self, refused: Policy) -> None:
        """Go out of service while another engine serves the refused policy; serve the old one while none does."""
        replicas = await call_in_thread(self._streams.read_replicas, LIVELY_S)
        others = [one for name, one in replicas.items() if name != self._name and not one.out_of_service]
        if any(one.serving == refused for one in others):
            if not self._engine.out_of_service:
                self._engine.out_of_service = self._withdrawn = self._reason
                log.error("out_of_service", detail=self._reason)
        elif self._withdrawn and self._engine.out_of_service == self._withdrawn:
            self._engine.out_of_service = self._withdrawn = ""
            log.warning("back_in_service", detail="no other engine serves the announced policy")
        self._has_news.set()

    async def _report_loop(self) -> NoReturn:
        """Say at each change what is served, and every `HEARTBEAT_INTERVAL_S` that it still is."""
        heartbeat_at = 0.0
        while True:
            self._has_news.clear()
            try:
                if self._last_status != self.describe() or time.monotonic() >= heartbeat_at:
                    await self._report()
                    heartbeat_at = time.monotonic() + HEARTBEAT_INTERVAL_S
            except UnavailableError as error:
                log.warning("waiting_for_redis", detail=str(error))
                await asyncio.sleep(RETRY_INTERVAL_S)  # wait: the main process names Redis
            # Not by `wait_for`, which swallows a cancellation where there is news at that moment.
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL_S):
                    await self._has_news.wait()  # wait: pause between two looks

    async def _report(self) -> None:
        await call_in_thread(self._streams.declare_dtype, self._engine.dtype)  # a server may have lost it
        word = self.describe()  # only now: the engine may have loaded another policy while the server was away
        is_new = word.HasField("serving") and (self._last_status is None or word.serving != self._last_status.serving)
        with self._record("serve", word.serving) if is_new else nullcontext():
            await call_in_thread(self._streams.acknowledge_policy, self._name, word)
        self._last_status = word

    def _record(self, operation: str, policy: Policy) -> AbstractContextManager[object]:
        records = self._streams.history
        return records.record(operation, history.describe_policy(policy)) if records else nullcontext()
