"""Pauses of generation: those that were asked for, and the short one in which weights are replaced."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

from forage_common.v1.trajectory_pb2 import Policy
from forage_rollout.weights.policy import TransferInfo, format_label


class GenerationPause:
    """Pauses and resumes one AsyncLLM. An update within a pause leaves it paused.

    Args:
        llm: vLLM's AsyncLLM.

    Attributes:
        is_paused: generation was paused and not resumed.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        # vLLM has a single pause: a pause, a resume and an update must not interleave, or one would end the other's.
        self._lock = asyncio.Lock()
        self._drained = AsyncExitStack()
        self._init_info: dict[str, Any] | None = None
        self._is_updating = False
        self.is_paused = False

    @property
    def is_intended(self) -> bool:
        """Whether generation stands still on purpose: such an engine does not hang."""
        return self.is_paused or self._is_updating

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
            async with self._lock:
                if not self.is_paused:
                    await self._llm.pause_generation(mode="wait" if drain else "keep", clear_cache=False)
                    self.is_paused = True
                    self._drained = entered.pop_all()

    async def resume(self) -> None:
        """End a pause; without one nothing happens."""
        async with self._lock:
            if self.is_paused:
                await self._llm.resume_generation()
                self.is_paused = False
                await self._drained.aclose()

    async def replace_weights(self, policy: Policy, transfer: TransferInfo) -> float:
        """Load a policy in place; after an exception the weights are undefined.

        Returns:
            Seconds that generation was paused.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        async with self._lock:
            self._is_updating = True
            try:
                if self._init_info != transfer.init_info:
                    if self._init_info is not None:
                        await self._llm.shutdown_weight_transfer_engine()
                    await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(transfer.init_info))
                    self._init_info = transfer.init_info
                start = time.perf_counter()
                # The prefix cache holds keys and values of the old weights and must not serve the new ones. Running
                # requests are kept ("keep"): they compute theirs again and go on under the new policy.
                await self._llm.pause_generation(mode="keep", clear_cache=True)
                await self._llm.start_weight_update()
                await self._llm.update_weights(WeightTransferUpdateRequest(transfer.update_info))
                # From here on vLLM marks sampled tokens with this label: it becomes the trajectory's segments.
                await self._llm.finish_weight_update(format_label(policy))
                if not self.is_paused:
                    await self._llm.resume_generation()
                return time.perf_counter() - start
            finally:
                self._is_updating = False
