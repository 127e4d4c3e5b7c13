"""Supervision that also says which service stands still, which no exit of a process tells."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from forage_cli.local.family import RunProcess, list_family
from forage_cli.local.inspection import answers
from forage_cli.local.stack import Program, Stack
from forage_runtime.clients.health import ANSWER_S

START_S = 180.0
"""A service that does not listen since its start is called silent after so long."""
_INTERVAL_S = 2.0


@dataclass
class _Heard:
    """When a process of a service was heard last; whether it ever listened; the trouble that was reported."""

    pid: int
    at: float
    listens: bool = False
    trouble: str = ""


class Watch:
    """Asks every service of a stack every two seconds, on a thread, while its block runs."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._heard: dict[Program, _Heard] = {}
        self._news: list[str] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._given_up: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._over.set()

    def tick(self, say: Callable[[str], object]) -> None:
        """Restart services that died, as `Supervisor.tick` does, and say who stands still and who goes on since."""
        supervisor = self._stack.supervisor
        supervisor.tick()
        for name in supervisor.given_up.keys() - self._given_up:
            self._given_up.add(name)
            say(f"the run goes on without the {name}: {supervisor.given_up[name]}")
        with self._lock:
            news, self._news = self._news, []
        for sentence in news:
            say(sentence)

    def _run(self) -> None:
        while not self._over.wait(_INTERVAL_S):  # wait: pause between two rounds
            family = list_family(self._stack.supervisor.tokens, ())
            for program in self._stack.programs:
                if program is not Program.CONSOLE:
                    self._look_at(program, [one for one in family if one.service == program])

    def _look_at(self, program: Program, processes: list[RunProcess]) -> None:
        pid = self._stack.supervisor.pid(program)
        if pid is None:  # the supervisor reports it
            self._heard.pop(program, None)
            return
        heard = self._heard.get(program)
        if heard is None or heard.pid != pid:
            heard = self._heard[program] = _Heard(pid, time.monotonic())
        stopped = [process for process in processes if process.is_stopped]
        answer = None if stopped else answers(program, self._stack.settings)
        heard.listens = heard.listens or answer is not None
        if answer:
            heard.at = time.monotonic()
        silent_s = time.monotonic() - heard.at
        trouble = ""
        if stopped:
            trouble = f"the {program}: {', '.join(map(str, stopped))} is stopped: kill -CONT lets it go on"
        elif silent_s > (limit_s := ANSWER_S if heard.listens else START_S):
            trouble = (
                f"the {program} (process {pid}) has not answered for {limit_s:.0f} s: "
                "'forage status --stacks' shows what it does"
            )
        if trouble != heard.trouble:
            with self._lock:
                self._news.append(trouble or f"the {program} goes on")
            heard.trouble = trouble
