"""Supervision of processes: start, restart after a crash, and stop without leaving one behind.

Every process starts in its own session and has a token in its environment, which its children inherit. Processes that
a killed service leaves behind (Ray starts a dozen) are found by that token and killed before the restart. A supervisor
that is killed itself leaves its record, by which the next one ends what still runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from forage_runtime.errors import ForageError, RolledBackError, StartError, UserError
from forage_runtime.files.durable import is_full, write_atomically
from forage_runtime.telemetry.logs import SERVICE_FAILED, get_logger

TOKEN = "FORAGE_RUN_TOKEN"
_HEALTHY_AFTER_S = 60.0
_QUICK_DEATHS = 5
_FAILURES, _WINDOW_S = 10, 3600.0
"""So many exits with an error within this time are the last ones, however long the service lived between them. Deaths
by a signal are not counted, which is how others end a service: machines that are drained, people."""
_FULL_DISK_RETRY_S = 2.0
_FULL_DISK_PATIENCE_S = 600.0
"""As long as the trainer waits for its own disk."""
_PR_SET_PDEATHSIG = 1
_PAUSE_S = 0.25
"""Doubled by each death in a row, and then waited before the next start."""
_KILL_S = 5.0
_LINE_LENGTH = 300
_SAME_START_S = 2.0
"""Largest difference of two readings of one process's start: it is derived from the clock, which may be set."""


class ServiceDiedError(ForageError):
    """A service died too often to be started again."""


@dataclass(frozen=True)
class Service:
    """Command of one program. A `job` is done when it exits with code 0; any other exit is restarted.

    folder: where it keeps data, if it ends when that disk is full.
    optional: the others go on without it, where it cannot start.
    """

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    job: bool = False
    stop_s: float = 15.0
    folder: Path | None = None
    optional: bool = False


@dataclass
class _Running:
    service: Service
    token: str
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    restart_at: float = 0.0
    quick_deaths: int = 0
    failed_at: deque[float] = field(default_factory=lambda: deque(maxlen=_FAILURES))
    restarts: int = 0
    full_since: float | None = None
    done: bool = False

    def count_deaths(self, code: int, lived_s: float) -> str:
        """Count a death; how often the service died, if that is too often to start it again, else nothing."""
        if self.service.job and code == RolledBackError.exit_code:  # the trainer counts its rollbacks itself
            return ""
        now = time.monotonic()
        self.quick_deaths = self.quick_deaths + 1 if lived_s < _HEALTHY_AFTER_S else 0
        if code > 0:
            self.failed_at.append(now)
        if self.quick_deaths >= _QUICK_DEATHS:
            return f"{self.quick_deaths} times in a row"
        if len(self.failed_at) == _FAILURES and now - self.failed_at[0] < _WINDOW_S:
            return f"{_FAILURES} times in {(now - self.failed_at[0]) / 60:.0f} minutes"
        return ""


class Supervisor:
    """Keeps services running; call `tick` about every half second. Not thread-safe."""

    def __init__(
        self,
        record: Path | None = None,
        on_restart: Callable[[str, str], object] = lambda name, why: None,
        on_failure: Callable[[str, str], object] = lambda name, why: None,
    ) -> None:
        """
        Args:
            record: file with the processes, for `end_leftovers`; removed by a clean stop.
            on_restart: called with the name of a service that died and is started again, and why it died.
            on_failure: called with the name of a service that is not started again, and why, before the error.
        """
        self._record = record
        self._on_restart = on_restart
        self._on_failure = on_failure
        self._running: dict[str, _Running] = {}
        self.given_up: dict[str, str] = {}
        """Optional service that is not started again → why."""
        self._log = get_logger()

    def start(self, service: Service) -> None:
        running = _Running(service, f"{service.name}-{uuid.uuid4().hex}")
        self._running[service.name] = running
        self._spawn(running)

    def tick(self) -> None:
        """Restart services that died.

        Raises:
            UserError: a service ended with exit code 2; the message is the end of its log, a line for each problem.
            StartError: a service ended with exit code 4; the message is the end of its log, and names the log.
            ServiceDiedError: a service died several times soon after its start, or again and again.
        """
        for running in self._running.values():
            if running.process is not None and (code := running.process.poll()) is not None:
                self._handle_exit(running, code)
            if running.process is None and not running.done and time.monotonic() >= running.restart_at:
                self._spawn(running)

    def is_done(self, name: str) -> bool:
        """Whether a job ended with exit code 0."""
        return self._running[name].done

    def pid(self, name: str) -> int | None:
        """Return the process id of a service, None while it is not running."""
        process = self._running[name].process
        return None if process is None or process.poll() is not None else process.pid

    @property
    def tokens(self) -> dict[str, str]:
        """Token in the environment of a service's processes → service."""
        return {running.token: name for name, running in list(self._running.items())}

    @property
    def restarts(self) -> dict[str, int]:
        """Service → number of restarts."""
        return {name: running.restarts for name, running in self._running.items()}

    def stop(self) -> None:
        """Stop all services, the last started first: SIGTERM, then SIGKILL after `stop_s`."""
        for running in reversed(self._running.values()):
            if running.process is not None:
                running.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running.process.wait(running.service.stop_s)  # wait: has a time limit
                # By its id: a process that overwrote its environment is not found by the token.
                running.process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running.process.wait(_KILL_S)  # wait: it was killed
            running.done = True
            self._kill_leftovers(running)
            running.process = None
        if self._record is not None:
            self._record.unlink(missing_ok=True)

    def _spawn(self, running: _Running) -> None:
        service = running.service
        service.log.parent.mkdir(parents=True, exist_ok=True)
        with service.log.open("ab") as log:
            running.process = subprocess.Popen(
                service.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **service.environment, TOKEN: running.token},
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        running.started = time.monotonic()
        if self._record is not None:
            self._write_record(self._record)

    def _write_record(self, file: Path) -> None:
        services = [
            {"token": running.token, **_describe_process(running.process.pid)}
            for running in self._running.values()
            if running.process is not None
        ]
        record = {"supervisor": _describe_process(os.getpid()), "services": services}
        write_atomically(file, json.dumps(record, indent=1) + "\n")

    def _handle_exit(self, running: _Running, code: int) -> None:
        service, lived = running.service, time.monotonic() - running.started
        self._kill_leftovers(running)
        running.process = None
        if code == 0 and service.job:
            running.done = True
            return
        if code == UserError.exit_code:
            if not service.optional:
                raise UserError(read_sentences(service.log))
            return self._give_up(running, read_sentences(service.log))
        if code == StartError.exit_code:
            reason = f"{read_sentences(service.log)}; the whole error is in {service.log}"
            if not service.optional:
                self._on_failure(service.name, reason)
                raise StartError(reason)
            return self._give_up(running, reason)
        if self._waits_for_disk(running):
            return
        why = describe_death(service.log, code)
        if times := running.count_deaths(code, lived):
            reason = f"{why}: the {service.name} died {times}; see {service.log}"
            if not service.optional:
                self._on_failure(service.name, reason)
                raise ServiceDiedError(reason)
            return self._give_up(running, reason)
        running.restarts += 1
        # At once after the first death: every second of a service that is down is one in which nothing is trained.
        wait_s = min(8.0, _PAUSE_S * 2**running.quick_deaths) if running.quick_deaths > 1 else 0.0
        running.restart_at = time.monotonic() + wait_s
        self._log.warning("service_died", name=service.name, code=code, lived_s=round(lived, 1), reason=why)
        self._on_restart(service.name, f"{service.name} died after {lived:.0f} s ({why})")

    def _give_up(self, running: _Running, reason: str) -> None:
        running.done = True
        self.given_up[running.service.name] = reason

    def _waits_for_disk(self, running: _Running) -> bool:
        """Whether a service died of a full disk; it is started again and again then, for a while."""
        folder, now = running.service.folder, time.monotonic()
        if folder is None or not is_full(folder):
            running.full_since = None
            return False
        running.full_since = running.full_since or now
        if now - running.full_since > _FULL_DISK_PATIENCE_S:
            return False
        running.restarts += 1
        running.restart_at = now + _FULL_DISK_RETRY_S
        self._log.warning("disk_full", name=running.service.name, folder=str(folder), fix="free some of its space")
        if running.full_since == now:
            self._on_restart(running.service.name, f"{running.service.name} died of a full disk")
        return True

    def _kill_leftovers(self, running: _Running) -> None:
        """Kill the processes that a service left behind."""
        for process in _find_by_token({running.token}):
            with contextlib.suppress(psutil.Error):
                process.kill()
                process.wait(_KILL_S)  # wait: it was killed


@contextlib.contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C until the block ends."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def end_leftovers(record: Path, grace_s: float = 15.0) -> list[int]:
    """End the processes of a supervisor that was killed: SIGTERM, then SIGKILL after `grace_s`.

    A process is one of them if it has its id and its start time, or its token; while the supervisor itself is alive
    there are none.

    Returns:
        The ids of the processes that were ended.
    """
    try:
        content = read_record(record)
        supervisor, services = content["supervisor"], content["services"]
        tokens = {str(service["token"]) for service in services}
        named = [process for service in services if (process := find_process(service)) is not None]
        is_supervised = find_process(supervisor) is not None
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        get_logger().warning("record_unreadable", file=str(record), reason=repr(error))
        return []
    if is_supervised:
        return []
    leftovers = {process.pid: process for process in (*named, *_find_by_token(tokens))}
    for process in leftovers.values():
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(leftovers.values(), grace_s)
    # A killed service may have left processes that it started meanwhile.
    for process in (*alive, *_find_by_token(tokens)):
        with contextlib.suppress(psutil.Error):
            process.kill()
            process.wait(_KILL_S)  # wait: it was killed
    record.unlink(missing_ok=True)
    if leftovers:
        get_logger().warning("leftovers_ended", processes=sorted(leftovers), killed=[process.pid for process in alive])
    return sorted(leftovers)


def _describe_process(pid: int) -> dict[str, float]:
    try:
        return {"pid": pid, "started": psutil.Process(pid).create_time()}
    except psutil.Error:  # it has ended already
        return {"pid": pid, "started": 0.0}


def find_process(described: Mapping[str, float]) -> psutil.Process | None:
    """Find the process of a record; None if it has ended, also where a stranger has its id now."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(int(described["pid"]))
        if abs(process.create_time() - described["started"]) < _SAME_START_S:
            return None if process.status() == psutil.STATUS_ZOMBIE else process
    return None


def find_supervisor(record: Path) -> psutil.Process | None:
    """Find the process whose supervisor runs the services of a record; None without one, and where it was killed."""
    try:
        return find_process(read_record(record)["supervisor"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_record(record: Path) -> dict[str, Any]:
    """Read what `Supervisor` has recorded of a run's processes.

    Raises:
        OSError, ValueError, KeyError, TypeError: there is no such file, or it is damaged.
    """
    if record.exists() and not record.is_file():
        raise ValueError(f"{record} is no file")  # reading a pipe would wait for ever
    try:
        content = json.loads(record.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{record} is nested too deeply") from None
    for process in (content["supervisor"], *content["services"]):
        if not isinstance(process["pid"], int) or not isinstance(process["started"], int | float):
            raise TypeError(f"{record} names no process by {process}")
    return {"supervisor": content["supervisor"], "services": content["services"]}


def is_damaged(record: Path) -> bool:
    """Whether there is a record that does not say which processes are the run's."""
    try:
        read_record(record)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError):
        return True
    return False


def _find_by_token(tokens: Set[str]) -> Iterator[psutil.Process]:
    for process in list(psutil.process_iter()):
        # Processes end meanwhile, and those of other users cannot be read.
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(TOKEN) in tokens:
                yield process


def read_sentences(log: Path) -> str:
    """Read with what a service ended, without the prefix "forage NAME: ": one sentence, or a line for each problem."""
    lines = _read_lines(log) or [f"a service ended without a message: see {log}"]
    begin = max((place for place, line in enumerate(lines) if line.startswith("forage ")), default=len(lines) - 1)
    text = "\n".join(lines[begin:])
    return text.partition(": ")[2] if text.startswith("forage ") else text


def describe_death(log: Path, code: int) -> str:
    """Describe why a service died, in one line: the error that it logged, a signal, or the end of its log."""
    if code < 0:
        hint = ": is there too little memory?" if -code == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"
    last = (_read_lines(log) or ["none"])[-1]
    return _find_failure(last) or f"exit code {code}, last line: {last[:_LINE_LENGTH]}"


def _find_failure(line: str) -> str:
    """The error of a line with which a service logs that it dies; empty if it is another line."""
    try:
        event = json.loads(line)
        return str(event["reason"]) if event["event"] == SERVICE_FAILED else ""
    except (ValueError, KeyError, TypeError):
        return ""


def _read_lines(log: Path) -> list[str]:
    return [line for line in log.read_bytes().decode(errors="replace").splitlines() if line.strip()]


def end_with_parent() -> None:
    """In the child: ask Linux to send SIGTERM when the supervisor dies, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
