"""What each service of a run does now: its processes, whether it answers, and what it waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from forage_cli.local.family import RunProcess, list_processes
from forage_cli.local.stack import RECORD, Program
from forage_queue.streams.client import StreamClient
from forage_records.run_folder import DONE, RunFolder
from forage_runtime.clients.health import (
    ANSWER_S,
    ServiceHealth,
    ask_readiness,
    ask_service,
    list_health_urls,
    name_ready,
)
from forage_runtime.errors import SettingsError, UnavailableError
from forage_runtime.settings import Settings

_LIST_S = 4.0
"""Longest wait for the list of the processes on this machine."""


@dataclass
class Inspection(ServiceHealth):
    """What was found out about one service.

    state: also starting (it does not listen yet), dead (its process has ended, and its supervisor has not started
    another one), or done (the trainer has said so: it answers nobody while it ends).
    processes: those on this machine that a supervisor has started for it; the first one is the service itself.
    """

    processes: list[RunProcess] = field(default_factory=list)

    @property
    def stopped(self) -> list[RunProcess]:
        return [process for process in self.processes if process.is_stopped]

    def list_lines(self) -> list[str]:
        """List what an operator should know, one sentence each."""
        lines = [f"{process} is stopped: kill -CONT {process.pid} lets it go on" for process in self.stopped]
        if self.state == "silent" and not self.stopped and not self.notes:
            lines.append(f"it has not answered for {ANSWER_S:g} s: forage status --stacks shows what it does")
        return lines + super().list_lines()


def inspect_run(settings: Settings, others: Iterable[Callable[[], None]] = ()) -> dict[Program, Inspection]:
    """Inspect every service of a run, at the same time; takes twenty seconds at most, whatever hangs.

    A service whose own process is stopped is not asked, as it cannot answer.

    Args:
        others: more to do meanwhile, such as reading from Redis.
    """
    found = {program: Inspection("silent") for program in Program}
    processes: dict[str, list[RunProcess]] = {}

    def ask(program: Program, url: str) -> None:
        found[program] = Inspection(**vars(ask_service(url, settings.tls)))

    def list_own() -> None:
        processes.update(list_processes(settings.run.folder.absolute() / RECORD))

    def ask_redis() -> None:
        found[Program.REDIS] = Inspection(**vars(_ask_redis(settings)))

    _call_all([list_own], _LIST_S)
    is_stopped = {one.service for every in processes.values() for one in every if one.is_main and one.is_stopped}
    asks: dict[str, Callable[[], None]] = {Program.REDIS: ask_redis}
    for name, address in list_health_urls(settings).items():
        asks[name] = lambda name=name, address=address: ask(Program(name), address)  # type: ignore[misc]
    others = () if Program.REDIS in is_stopped else others
    _call_all([*(call for name, call in asks.items() if name not in is_stopped), *others], ANSWER_S + 1)
    for program, one in found.items():
        one.processes = processes.get(program, [])
        if one.state == "not running" and program in processes:
            is_alive = any(process.is_main for process in one.processes)
            one.state = "silent" if one.stopped else "starting" if is_alive else "dead"
    trainer = found[Program.TRAINER]
    if trainer.answered_s is None and not trainer.stopped and has_finished(settings.run.folder):
        trainer.state = "done"
    return found


def has_finished(run: Path) -> bool:
    """Whether the trainer of a run has said that it is done."""
    return RunFolder(run).read_progress().phase == DONE


def _call_all(calls: Iterable[Callable[[], None]], limit_s: float) -> None:
    """Make all calls at the same time, and wait for those that end in time."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))  # wait: has a time limit


def ask_program(program: Program, settings: Settings, client: httpx.Client) -> ServiceHealth:
    """Ask a service for its readiness; Redis whether it can be used.

    Args:
        client: of `open_client`.
    """
    if program is not Program.REDIS:
        return ask_readiness(list_health_urls(settings)[program], client)
    return _ask_redis(settings)


def open_streams(settings: Settings) -> StreamClient:
    """Open the streams of a run for a look: each call has `ANSWER_S` for its two attempts, and ends at once if refused.

    Raises:
        SettingsError: a file of the settings cannot be read.
    """
    return StreamClient(settings.redis.model_copy(update={"timeout_s": ANSWER_S / 2}), settings.run.id, patience_s=1)


def _ask_redis(settings: Settings) -> ServiceHealth:
    begun = time.monotonic()
    try:
        open_streams(settings).ping()
    except SettingsError as error:
        return ServiceHealth("silent", notes={"redis": str(error)})
    except UnavailableError as error:
        reason = str(error)
        if "refused" in reason:  # nobody listens
            return ServiceHealth()
        if reason.startswith("no answer"):
            return ServiceHealth("silent", notes={"redis": reason})
        return ServiceHealth("not ready", {"start": reason}, answered_s=time.monotonic() - begun)
    answered_s = time.monotonic() - begun
    return ServiceHealth(name_ready(answered_s), answered_s=answered_s)
