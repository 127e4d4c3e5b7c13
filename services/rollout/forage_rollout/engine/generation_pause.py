"""When generation stands still: a pause that somebody asked for, and the moment in which weights are replaced."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

from forage_common.v1.trajectory_pb2 import Policy
from forage_rollout.weights.policy import label
from forage_rollout.weights.transport import Shipment


class Standstill:
    """Stops one AsyncLLM and lets it go on; an update within a pause leaves it paused.

    Args:
        llm: vLLM's AsyncLLM.

    Attributes:
        paused: generation was paused and not resumed.
        intended: generation stands still on purpose, for whichever reason.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._turn = asyncio.Lock()
        self._held = AsyncExitStack()
        self._agreed: dict[str, Any] | None = None
        self._updating = False
        self.paused = False

    @property
    def intended(self) -> bool:
        return self.paused or self._updating

    async def pause(self, drain: bool, drained: AbstractAsyncContextManager[None]) -> None:
        """Stand still until `resume`.

        Args:
            drain: running generations end first; else they go on after `resume`.
            drained: entered before, where `drain` is set, and left after `resume`.
        """
        async with AsyncExitStack() as held:
            if drain and not self.paused:
                await held.enter_async_context(drained)
            async with self._turn:
                if not self.paused:
                    await self._llm.pause_generation(mode="wait" if drain else "keep", clear_cache=False)
                    self.paused = True
                    self._held = held.pop_all()

    async def resume(self) -> None:
        """End a pause; without one nothing happens."""
        async with self._turn:
            if self.paused:
                await self._llm.resume_generation()
                self.paused = False
                await self._held.aclose()

    async def update(self, policy: Policy, shipment: Shipment) -> float:
        """Replace the weights in place. After an exception they are undefined.

        Returns:
            Seconds that generation stood still.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        async with self._turn:
            self._updating = True
            try:
                if self._agreed != shipment.init_info:
                    if self._agreed is not None:
                        await self._llm.shutdown_weight_transfer_engine()
                    await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(shipment.init_info))
                    self._agreed = shipment.init_info
                start = time.perf_counter()
                # Keys and values of the old weights must go: running requests compute theirs again.
                await self._llm.pause_generation(mode="keep", clear_cache=True)
                await self._llm.start_weight_update()
                await self._llm.update_weights(WeightTransferUpdateRequest(shipment.update_info))
                await self._llm.finish_weight_update(label(policy))
                if not self.paused:
                    await self._llm.resume_generation()
                return time.perf_counter() - start
            finally:
                self._updating = False
