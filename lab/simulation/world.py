"""Processes on a virtual clock: a seeded scheduler that runs one task at a time and can kill or pause a process.

A task is a greenlet: it runs until it sleeps or waits, and nothing else runs meanwhile. Which of several tasks that are
due at one instant goes first is drawn from the seed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet

_FIRST_PID = 1000


class Killed(BaseException):
    """The process of this task was killed: nothing that it still does may have an effect."""


class Signal:
    """What tasks wait for; every waiting task goes on when it is set."""

    def __init__(self) -> None:
        self.waiting: list[Task] = []


class Task(greenlet):
    """One thread of a process."""

    def __init__(self, world: World, process: Process, body: Callable[[], Any]) -> None:
        super().__init__(body, world.hub)
        self.process = process
        self.turn = 0
        """Grows whenever the task goes on: what was scheduled for an earlier turn is void."""
        self.was_set = False


class Process:
    """A process. `code` is None while it runs."""

    def __init__(self, world: World, name: str, main: Callable[[], int]) -> None:
        self.name = name
        self.pid = world.add(self)
        self.code: int | None = None
        self.paused_until = 0.0
        self.started = world.now
        self.ended = Signal()
        self.children: list[Process] = []
        self._world = world
        self._tasks: list[Task] = []
        self.spawn(lambda: self._run(main))

    @property
    def is_alive(self) -> bool:
        return self.code is None

    def spawn(self, body: Callable[[], Any]) -> Task:
        """Start another task of this process."""
        task = Task(self._world, self, body)
        self._tasks = [old for old in self._tasks if not old.dead]
        self._tasks.append(task)
        self._world.schedule(task, self._world.now)
        return task

    def end(self, code: int = -9) -> None:
        """End at once. The tasks unwind, without any effect, when they would go on."""
        if self.code is None:
            self.code = code
            self.paused_until = 0.0
            for task in self._tasks:
                self._world.schedule(task, self._world.now)
            self._world.set(self.ended)

    def _run(self, main: Callable[[], int]) -> None:
        self.end(main())


class World:
    """The clock, the tasks and the seeded choices of one schedule."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.wall_offset = 1_800_000_000.0
        """Wall clock minus `now`; a jump of the clock changes it."""
        self.hub = getcurrent()
        self.processes: dict[int, Process] = {}
        self.failures: list[str] = []
        """Errors that no program should have raised."""
        self._queue: list[tuple[float, float, int, Task | Callable[[], None], int]] = []
        self._count = 0

    def add(self, process: Process) -> int:
        """Give a process its id."""
        pid = _FIRST_PID + len(self.processes)
        self.processes[pid] = process
        return pid

    @property
    def process(self) -> Process | None:
        """The process that runs now; None for the scheduler itself."""
        return getattr(getcurrent(), "process", None)

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Run everything until a condition holds; False if time ran out or nothing is left to run."""
        while not until():
            if not self._queue:
                return False
            when, _, _, what, turn = heapq.heappop(self._queue)
            if not isinstance(what, Task):
                self.now = max(self.now, when)
                what()
                continue
            if what.turn != turn or what.dead:
                continue
            if what.process.paused_until > when:
                self.schedule(what, what.process.paused_until)
                continue
            if when > limit_s:
                return False
            self.now = max(self.now, when)
            what.turn += 1
            if not what and not what.process.is_alive:  # killed before its first turn
                continue
            try:
                what.switch()
            except Killed:
                pass
            except Exception as error:  # noqa: BLE001 - reported as a violation, with the schedule that led to it
                self.failures.append(f"{what.process.name}: {type(error).__name__}: {error}")
                what.process.end(1)
        return True

    def close(self) -> None:
        """Unwind every task that is left."""
        for task in {entry[3] for entry in self._queue if isinstance(entry[3], Task)}:
            task.process.end()
        self.run(lambda: not self._queue, float("inf"))

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Let the scheduler itself do something at an instant."""
        self._push(when, action, 0)

    def sleep(self, seconds: float) -> None:
        """Let the running task sleep."""
        task = getcurrent()
        assert isinstance(task, Task)
        self.schedule(task, self.now + max(0.0, seconds))
        self._suspend(task)

    def wait(self, signal: Signal, timeout_s: float | None = None) -> bool:
        """Let the running task wait; False if the time was over first."""
        task = getcurrent()
        assert isinstance(task, Task)
        task.was_set = False
        signal.waiting.append(task)
        if timeout_s is not None:
            self.schedule(task, self.now + max(0.0, timeout_s))
        self._suspend(task)
        if task in signal.waiting:
            signal.waiting.remove(task)
        return task.was_set

    def set(self, signal: Signal) -> None:
        """Let every task that waits for a signal go on."""
        for task in signal.waiting:
            task.was_set = True
            self.schedule(task, self.now)
        signal.waiting.clear()

    def schedule(self, task: Task, when: float) -> None:
        self._push(when, task, task.turn)

    def check_alive(self) -> None:
        """
        Raises:
            Killed: the running process was killed.
        """
        if (process := self.process) is not None and not process.is_alive:
            raise Killed

    def _push(self, when: float, what: Task | Callable[[], None], turn: int) -> None:
        self._count += 1
        heapq.heappush(self._queue, (when, self.random.random(), self._count, what, turn))

    def _suspend(self, task: Task) -> None:
        self.hub.switch()
        if not task.process.is_alive:
            raise Killed
