"""Supervision of real processes: restarts, clean stops, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from forage_cli.local.processes import Service, ServiceDiedError, Supervisor
from forage_common.errors import UserError

FOREVER = "import time\nwhile True: time.sleep(1)"


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.stop()


def service(tmp_path: Path, code: str, **options: object) -> Service:
    return Service("worker", [sys.executable, "-c", code], tmp_path / "worker.log", **options)  # type: ignore[arg-type]


def until(supervisor: Supervisor, condition: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        supervisor.tick()
        time.sleep(0.02)


def test_a_killed_service_is_restarted(tmp_path: Path, supervisor: Supervisor) -> None:
    supervisor.start(service(tmp_path, FOREVER))
    first = supervisor.pid("worker")
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(supervisor, lambda: supervisor.pid("worker") not in (None, first))
    assert supervisor.restarts == {"worker": 1}


def test_processes_left_by_a_killed_service_are_killed_before_its_restart(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    orphan = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {FOREVER!r}], start_new_session=True)\n"
        f"open({str(tmp_path / 'child')!r}, 'a').write(f'{{child.pid}}\\n')\n"
        "time.sleep(600)"
    )
    supervisor.start(service(tmp_path, orphan))
    file = tmp_path / "child"
    until(supervisor, lambda: file.exists() and file.read_text().count("\n") == 1)
    child = psutil.Process(int(file.read_text()))
    pid = supervisor.pid("worker")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(supervisor, lambda: file.read_text().count("\n") == 2)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    second = psutil.Process(int(file.read_text().split()[1]))
    supervisor.stop()
    assert not second.is_running() or second.status() == psutil.STATUS_ZOMBIE


def test_a_job_with_exit_code_0_is_done_and_not_restarted(tmp_path: Path, supervisor: Supervisor) -> None:
    supervisor.start(service(tmp_path, "pass", job=True))
    until(supervisor, lambda: supervisor.is_done("worker"))
    supervisor.tick()
    assert supervisor.restarts == {"worker": 0}


def test_a_users_error_stops_the_supervisor_with_the_services_message(tmp_path: Path, supervisor: Supervisor) -> None:
    code = "import sys; print('forage worker: no such corpus: give another', file=sys.stderr); sys.exit(2)"
    supervisor.start(service(tmp_path, code))
    with pytest.raises(UserError, match=r"^no such corpus: give another$"):
        until(supervisor, lambda: False)


def test_a_service_that_keeps_dying_is_an_error_that_names_its_log(tmp_path: Path, supervisor: Supervisor) -> None:
    supervisor.start(service(tmp_path, "raise SystemExit(7)"))
    with pytest.raises(ServiceDiedError, match=r"exit code 7.*worker\.log"):
        until(supervisor, lambda: False, 30)


def test_a_service_that_ignores_sigterm_is_killed_after_its_time_to_stop(tmp_path: Path) -> None:
    supervisor = Supervisor()
    code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True)\n{FOREVER}"
    supervisor.start(service(tmp_path, code, stop_s=0.3))
    until(supervisor, lambda: "on" in (tmp_path / "worker.log").read_text())
    pid = supervisor.pid("worker")
    assert pid is not None
    supervisor.stop()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_services_stop_when_the_supervisor_is_killed(tmp_path: Path, repository: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom forage_cli.local.processes import Service, Supervisor\n"
        "s = Supervisor()\n"
        f"s.start(Service('worker', [sys.executable, '-c', {FOREVER!r}], Path({str(tmp_path)!r}) / 'log'))\n"
        "print(s.pid('worker'), flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    worker.wait(10)
    assert not worker.is_running()
