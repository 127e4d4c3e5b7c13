"""asyncio on the virtual clock: a loop that is one task of a simulated process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

from simulation.world import Killed, Signal, World


class _OrderedTask(asyncio.Task[Any]):
    """A task whose hash follows from its number: sets of tasks then have one order in every run."""

    _numbers = itertools.count()

    def __init__(self, *args: Any, **named: Any) -> None:
        self._number = next(self._numbers)
        super().__init__(*args, **named)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop that waits by letting the world go on."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._wake = Signal()
        self._is_woken = False
        self._selector = self  # BaseEventLoop waits with `self._selector.select(timeout)`
        self.set_task_factory(lambda loop, work, **named: _OrderedTask(work, loop=loop, **named))
        self.set_exception_handler(lambda *_: None)  # of tasks that end with their killed process

    def time(self) -> float:
        return self._world.now

    def select(self, timeout: float | None) -> list[Any]:
        if timeout != 0 and not self._is_woken:
            # Other loops run meanwhile, and asyncio allows one running loop for each thread.
            asyncio._set_running_loop(None)
            self._world.wait(self._wake, timeout)
            asyncio._set_running_loop(self)
        self._is_woken = False
        return []

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        self._is_woken = True
        self._world.set(self._wake)

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run a function as a task of the process, as `asyncio.to_thread` does on a thread."""
        future = self.create_future()
        process = self._world.process
        assert process is not None

        def deliver(value: Any, error: BaseException | None) -> None:
            if not future.done():
                future.set_exception(error) if error is not None else future.set_result(value)

        def run() -> None:
            try:
                value, error = function(*args), None
            except Exception as raised:  # noqa: BLE001 - handed on to whoever awaits the future
                value, error = None, raised
            self.call_soon_threadsafe(deliver, value, error)

        process.spawn(run)
        return future


def run_async(world: World, main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run a program on a loop of its own; returns its exit code."""
    loop = VirtualLoop(world)
    try:
        return loop.run_until_complete(main())
    except Killed:
        with contextlib.suppress(RuntimeError):
            asyncio._set_running_loop(None)
        raise
