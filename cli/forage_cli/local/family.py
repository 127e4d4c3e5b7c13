"""The local processes of a run: which live, which stand still, and their Python stacks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from forage_cli.local.processes import TOKEN, find_process, read_record
from forage_runtime.telemetry.stacks import SIGNAL, find_stack_file

_WAIT_S = 3.0
_QUIET_S = 0.3
_CAUGHT = re.compile(r"^SigCgt:\s*([0-9a-f]+)$", re.MULTILINE)


@dataclass(frozen=True)
class RunProcess:
    """One process of a run. service: the service that it belongs to; is_main: the one that was started as such."""

    service: str
    pid: int
    name: str
    state: str
    is_main: bool

    @property
    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP holds it."""
        return self.state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name})"


def list_services(record: Path) -> set[str]:
    """List the services that the supervisor of a run has started; empty without a record."""
    try:
        return {_name_service(service) for service in read_record(record)["services"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _name_service(recorded: Mapping[str, object]) -> str:
    return str(recorded["token"]).rpartition("-")[0]


def list_processes(record: Path) -> dict[str, list[RunProcess]]:
    """List the processes that live, by service, of a run whose supervisor runs or was killed; empty without a record.

    A service whose main process is dead is there, without it.
    """
    try:
        services = read_record(record)["services"]
        tokens = {str(service["token"]): _name_service(service) for service in services}
        mains = {process.pid for service in services if (process := find_process(service)) is not None}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    family = list_family(tokens, mains)
    return {name: [process for process in family if process.service == name] for name in tokens.values()}


def list_family(tokens: Mapping[str, str], mains: Iterable[int]) -> list[RunProcess]:
    """List the processes that have one of the tokens, or an ancestor that does.

    Args:
        tokens: token in the environment → service.
        mains: ids of the processes that the supervisor started.
    """
    mains = set(mains)
    found: dict[int, RunProcess] = {}
    services: dict[int, str] = {}
    for process in psutil.process_iter():
        # Processes end meanwhile, and those of other users cannot be read.
        with contextlib.suppress(psutil.Error, OSError):
            token = process.environ().get(TOKEN, "")
            # A process that overwrote its environment is found by its parent, which is older.
            service = tokens.get(token) or services.get(process.ppid())
            if service is None or process.pid == os.getpid():
                continue
            services[process.pid] = service
            state = process.status()
            if state != psutil.STATUS_ZOMBIE:
                found[process.pid] = RunProcess(service, process.pid, _find_name(process), state, process.pid in mains)
    return sorted(found.values(), key=lambda one: (one.service, not one.is_main, one.pid))


def _find_name(process: psutil.Process) -> str:
    line = process.cmdline()
    if "-m" in line[:-1]:
        return line[line.index("-m") + 1]
    title = " ".join(line).strip()
    return title if "::" in title else process.name()  # Ray and vLLM give their processes a title


def fetch_stacks(processes: Iterable[RunProcess], folder: Path) -> dict[int, str]:
    """Fetch the Python stacks of processes, or why there are none: process id → text. Takes three seconds at most."""
    texts: dict[int, str] = {}
    asked: dict[int, tuple[Path, int]] = {}
    for process in processes:
        file = find_stack_file(folder, process.pid)
        if process.is_stopped:
            texts[process.pid] = f"it is stopped and cannot answer: kill -CONT {process.pid} lets it go on"
        elif not file.exists() or not _catches_signal(process.pid):
            texts[process.pid] = "it has no Python stacks to show"
        else:
            asked[process.pid] = file, file.stat().st_size
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, SIGNAL)
    deadline = time.monotonic() + _WAIT_S
    sizes: dict[int, int] = {}
    while time.monotonic() < deadline:
        time.sleep(_QUIET_S)  # wait: three seconds at most
        before, sizes = sizes, {pid: file.stat().st_size for pid, (file, _) in asked.items()}
        if sizes == before and all(sizes[pid] > begin for pid, (_, begin) in asked.items()):
            break
    for pid, (file, begin) in asked.items():
        with file.open(encoding="utf-8", errors="replace") as stream:
            stream.seek(begin)
            texts[pid] = stream.read().strip() or f"it did not answer within {_WAIT_S:g} s"
    return texts


def _catches_signal(pid: int) -> bool:
    """Whether the signal would not end the process: its file may be left from a process with the same id."""
    try:
        # A process may have a name that is no UTF-8.
        match = _CAUGHT.search(Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return os.name == "posix" and not Path("/proc/self/status").exists()  # elsewhere than on Linux the file decides
    return match is not None and bool(int(match.group(1), 16) >> (signal.Signals(SIGNAL) - 1) & 1)
