"""Times without generation: pauses that were asked for, the short one for a policy, and sleep without memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from forage_proto.v1.trajectory_pb2 import Policy
from forage_rollout.engine.scheduler_watch import SchedulerWatch
from forage_weights.rollout.canary import hold_requests
from forage_weights.rollout.policy import format_label


class GenerationPause:
    """Pauses and resumes one AsyncLLM. An update within a pause leaves it paused, and so does a sleep.

    An engine that sleeps has given its GPUs' memory away. Nothing may be computed then: whoever wants a pause or a new
    policy waits, and requests wait inside vLLM.

    Args:
        llm: vLLM's AsyncLLM.
        watch: learns when the cache is cleared.

    Attributes:
        is_paused: generation was paused and not resumed.
        is_updating: a policy is being put in place.
        is_asleep: weights and cache, or the cache alone, have no memory.
        has_weights: set while the weights have memory.
    """

    def __init__(self, llm: Any, watch: SchedulerWatch) -> None:
        self._llm = llm
        self._watch = watch
        # vLLM has a single pause: a pause, a resume and an update must not interleave, or one would end the other's.
        self._lock = asyncio.Lock()
        self._drained = AsyncExitStack()
        self._check: Callable[[], Awaitable[None]] | None = None
        self.is_updating = False
        self.is_paused = False
        self.is_asleep = False
        self.has_weights = asyncio.Event()
        self.has_weights.set()
        self._is_awake = asyncio.Event()
        self._is_awake.set()

    @property
    def is_intended(self) -> bool:
        """Whether generation stands still on purpose: such an engine does not hang."""
        return self.is_paused or self.is_updating or self.is_asleep

    async def fall_asleep(self) -> None:
        """Free the memory of weights and cache; running generations are kept, and go on after `wake_up`."""
        async with self._lock:
            if self.is_asleep and not self.has_weights.is_set():
                return
            self.is_asleep = True
            self.has_weights.clear()
            self._is_awake.clear()
            # Level 1 keeps the weights in the host's memory: an engine that then cannot load a policy has the old one.
            with self._watch.clearing():
                await self._llm.sleep(level=1, mode="keep")  # wait: the caller has a time limit

    async def wake_weights(self) -> None:
        """Take the memory of the weights again, so that a policy can be put in place while there is no cache yet."""
        async with self._lock:
            if not self.has_weights.is_set():
                await self._llm.wake_up(["weights"])
                self.has_weights.set()

    async def wake_up(self) -> None:
        """End a sleep; without one nothing happens."""
        await self.wake_weights()
        async with self._lock:
            if self.is_asleep:
                async with self._holding():
                    await self._llm.wake_up(["kv_cache"])  # vLLM resumes with it, unless it is held
                    check, self._check = self._check, None
                    if check is not None:
                        await check()
                if self.is_paused:
                    await self._llm.pause_generation(mode="keep", clear_cache=False)
                self.is_asleep = False
                self._is_awake.set()

    @asynccontextmanager
    async def _holding(self) -> AsyncIterator[None]:
        """Where a policy waits for its check, keep vLLM paused within the block; the pause ends after it."""
        if self._check is None:
            yield
            return
        held = await hold_requests(self._llm)
        try:
            yield
        finally:
            await self._llm.abort(held)
        await self._llm.resume_generation()

    async def pause(self, drain: bool, drained: AbstractAsyncContextManager[None]) -> None:
        """Hold generation until `resume`.

        Args:
            drain: running generations end first; else they go on after `resume`.
            drained: entered before the pause where `drain` is set, and left after `resume`.
        """
        async with AsyncExitStack() as entered:
            if drain and not self.is_paused:
                # Outside the lock: draining may take as long as a trajectory, and an update must not wait for it.
                await entered.enter_async_context(drained)
            while True:
                await self._is_awake.wait()  # wait: for the end of a sleep; the caller has a time limit
                async with self._lock:
                    if self.is_asleep:
                        continue
                    if not self.is_paused:
                        await self._llm.pause_generation(mode="wait" if drain else "keep", clear_cache=False)
                        self.is_paused = True
                        self._drained = entered.pop_all()
                    return

    async def resume(self) -> None:
        """End a pause; without one nothing happens."""
        async with self._lock:
            if self.is_paused:
                if not self.is_asleep:
                    await self._llm.resume_generation()
                self.is_paused = False
                await self._drained.aclose()

    async def take_over(self, before: GenerationPause) -> None:
        """Go on with the pause of another instance, whose engine this one's replaces."""
        async with self._lock:
            if before.is_paused:
                await self._llm.pause_generation(mode="keep", clear_cache=False)
                self.is_paused, self._drained = True, before._drained

    async def put_policy(
        self, policy: Policy, number: int, check: Callable[[], Awaitable[None]] | None = None
    ) -> tuple[float, float]:
        """Put a policy in place that the workers have ready; after an exception the weights are undefined.

        Args:
            number: the policy's number in `Stager.stage`.
            check: called before anything is sampled; may raise to prevent it. Without a cache `wake_up` calls it.

        Returns:
            Seconds until the running step had ended, and seconds that generation then stood still.
        """
        async with self._lock:
            self.is_updating = True
            try:
                core = self._llm.engine_core
                asked = time.perf_counter()
                # Not by `pause_generation`: it sleeps for 20 ms once generation has stopped.
                await core.pause_scheduler_async(mode="keep", clear_cache=False)
                begin = time.perf_counter()
                # The caches hold keys and values of the old weights and must not serve the new ones. Running requests
                # are kept ("keep"): they compute theirs again and go on under the new policy.
                await self._llm.renderer.clear_mm_cache_async()
                # Sent at once, because each answer takes as long as the work: the core takes them in this order.
                with self._watch.clearing():
                    await asyncio.gather(
                        core.pause_scheduler_async(mode="keep", clear_cache=True),
                        self._llm.collective_rpc("put_policy", args=(number,)),
                        # From here on vLLM marks sampled tokens with this label: it becomes the trajectory's segments.
                        self._llm.update_weight_version(format_label(policy)),
                    )
                if self.is_asleep:
                    self._check = check
                elif check is not None:
                    await check()
                if not (self.is_paused or self.is_asleep):
                    await self._llm.resume_generation()
                return begin - asked, time.perf_counter() - begin
            finally:
                self.is_updating = False
