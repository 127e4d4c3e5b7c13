"""Supervision that also knows what each service does, which no exit of a process tells."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType

import httpx

from forage_cli.local.family import RunProcess, list_family
from forage_cli.local.inspection import ask_program, has_finished
from forage_cli.local.stack import Program, Stack
from forage_runtime.clients.health import ANSWER_S, open_client

START_S = 180.0
"""A service that does not listen since its start is called silent after so long."""
_INTERVAL_S = 2.0


@dataclass(frozen=True)
class ServiceStatus:
    """What one service does.

    Attributes:
        state: as of `ServiceHealth`; or starting, stopped (by a signal), restarting, given up, or done.
        detail: what it waits for, or what is wrong; empty if nothing is.
        since: when the state began, of `time.monotonic`.
        restarts: how often it was started again.
    """

    state: str = "starting"
    detail: str = ""
    since: float = 0.0
    restarts: int = 0


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
        watched = [program for program in stack.programs if program is not Program.CONSOLE]  # no run waits for it
        self._statuses: dict[Program, ServiceStatus] = {one: ServiceStatus(since=time.monotonic()) for one in watched}
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

    @property
    def statuses(self) -> Mapping[Program, ServiceStatus]:
        """What each service does, in the order of their start."""
        restarts = self._stack.supervisor.restarts
        with self._lock:
            return {name: replace(status, restarts=restarts.get(name, 0)) for name, status in self._statuses.items()}

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
        with open_client(self._stack.settings.tls) as client:
            while not self._over.is_set():
                family = list_family(self._stack.supervisor.tokens, ())
                for program in self._statuses:
                    self._look_at(program, [one for one in family if one.service == program], client)
                self._over.wait(_INTERVAL_S)  # wait: pause between two rounds

    def _look_at(self, program: Program, processes: list[RunProcess], client: httpx.Client) -> None:
        supervisor = self._stack.supervisor
        pid = supervisor.pid(program)
        if pid is None:  # the supervisor reports it
            self._heard.pop(program, None)
            given_up = supervisor.given_up.get(program, "")
            state = "given up" if given_up else "done" if supervisor.is_done(program) else "restarting"
            self._set_status(program, state, given_up)
            return
        heard = self._heard.get(program)
        if heard is None or heard.pid != pid:
            heard = self._heard[program] = _Heard(pid, time.monotonic())
            self._set_status(program, "starting", "")
        if stopped := [process for process in processes if process.is_stopped]:
            trouble = f"{', '.join(map(str, stopped))} is stopped: kill -CONT lets it go on"
            self._set_status(program, "stopped", trouble)
            return self._report(program, heard, f"the {program}: {trouble}")
        health = ask_program(program, self._stack.settings, client)
        heard.listens = heard.listens or health.state != "not running"
        if health.answered_s is not None:
            heard.at = time.monotonic()
            self._set_status(program, health.state, health.explain())
            return self._report(program, heard, "")
        if program is Program.TRAINER and has_finished(self._stack.folder):
            self._set_status(program, "done", "")
            return self._report(program, heard, "")
        if time.monotonic() - heard.at <= (limit_s := ANSWER_S if heard.listens else START_S):
            return None  # for now it is what it was
        why = f" ({health.explain()})" if health.notes else ""
        trouble = f"has not answered for {limit_s:.0f} s{why}: 'forage status --stacks' shows what it does"
        self._set_status(program, "silent", f"it {trouble}")
        self._report(program, heard, f"the {program} (process {pid}) {trouble}")

    def _set_status(self, program: Program, state: str, detail: str) -> None:
        with self._lock:
            before = self._statuses[program]
            since = before.since if before.state == state else time.monotonic()
            self._statuses[program] = ServiceStatus(state, detail, since)

    def _report(self, program: Program, heard: _Heard, trouble: str) -> None:
        """Have `tick` say a trouble that is new, or that there is none any more."""
        if trouble != heard.trouble:
            with self._lock:
                self._news.append(trouble or f"the {program} goes on")
            heard.trouble = trouble
