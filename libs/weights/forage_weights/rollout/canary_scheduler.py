"""vLLM's scheduler with a way past a pause: requests that score a canary run while every other one is held."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler

from forage_weights.rollout.canary import HOLD, PREFIX


class _CanaryFirst:
    """Beside vLLM's scheduler, whose methods these extend.

    Requests whose ids begin with `PREFIX` run alone, whatever the state of the pause. While there is one that begins
    with `HOLD`, which never runs, no pause ends.
    """

    def __init__(self, **parts: Any) -> None:
        self._canaries: set[str] = set()
        super().__init__(**parts)

    def add_request(self, request: Any) -> None:
        if request.request_id.startswith(PREFIX):
            self._canaries.add(request.request_id)
        super().add_request(request)  # type: ignore[misc]  # the base is vLLM's scheduler

    def set_pause_state(self, pause_state: PauseState) -> None:
        if pause_state == PauseState.UNPAUSED and any(map(self._is_held, self._list_canaries())):
            return
        super().set_pause_state(pause_state)  # type: ignore[misc]

    def get_num_unfinished_requests(self) -> int:
        unfinished: int = super().get_num_unfinished_requests()  # type: ignore[misc]
        return unfinished or len(self._list_runnable())

    def schedule(self, *arguments: Any, **named: Any) -> Any:
        runnable = self._list_runnable()
        if not runnable:
            return super().schedule(*arguments, **named)  # type: ignore[misc]
        with self._alone(runnable):
            scheduled = super().schedule(*arguments, **named)  # type: ignore[misc]
        if not scheduled.num_scheduled_tokens:
            self._make_room(runnable)
        return scheduled

    def _make_room(self, names: set[str]) -> None:
        """Where no canary can begin, the cache is full: evict the request that vLLM would, the last that runs.

        Its tokens are computed again later, as after each eviction. Nothing else would end: canaries run alone.
        """
        scheduler: Any = self
        if any(request.request_id in names for request in scheduler.running):
            return  # one of them waits for its output, not for room
        if scheduler.running:
            scheduler._preempt_request(scheduler.running.pop(), time.monotonic())

    def _list_canaries(self) -> set[str]:
        if self._canaries:
            self._canaries &= self.requests.keys()  # type: ignore[attr-defined]  # of vLLM's scheduler
        return self._canaries

    def _list_runnable(self) -> set[str]:
        return {name for name in self._list_canaries() if not self._is_held(name)}

    @staticmethod
    def _is_held(name: str) -> bool:
        return name.startswith(HOLD)

    @contextmanager
    def _alone(self, names: set[str]) -> Iterator[None]:
        """Have no other requests than these, and no pause, in the block."""
        scheduler: Any = self
        waiting, holding, running = scheduler.waiting, scheduler.kv_holding_waiting, scheduler.running
        state = scheduler._pause_state
        mine = [request for request in waiting if request.request_id in names]
        waiting.remove_requests(mine)
        scheduler.waiting = create_request_queue(scheduler.policy)
        scheduler.kv_holding_waiting = create_request_queue(scheduler.policy)
        for request in mine:
            scheduler.waiting.add_request(request)
        scheduler.running = [request for request in running if request.request_id in names]
        scheduler._pause_state = PauseState.UNPAUSED
        try:
            yield
        finally:
            for request in (*scheduler.waiting, *scheduler.kv_holding_waiting):
                waiting.add_request(request)
            others = [request for request in running if request.request_id not in names]
            scheduler.running = scheduler.running + others
            scheduler.waiting, scheduler.kv_holding_waiting = waiting, holding
            scheduler._pause_state = state


class _CanaryScheduler(_CanaryFirst, Scheduler):  # type: ignore[misc]  # vLLM is not in the linter's environment
    pass


class _CanaryAsyncScheduler(_CanaryFirst, AsyncScheduler):  # type: ignore[misc]
    pass


def build_scheduler(vllm_config: Any, **parts: Any) -> Any:
    """The scheduler that vLLM would take, extended; see `vllm.config.SchedulerConfig.scheduler_cls`."""
    kind = _CanaryAsyncScheduler if vllm_config.scheduler_config.async_scheduling else _CanaryScheduler
    return kind(vllm_config=vllm_config, **parts)
