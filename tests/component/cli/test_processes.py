"""Supervision of real processes: restarts, clean stops, and no process left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import waiting
from waiting import WAIT_S

from forage_cli.local import processes
from forage_cli.local.processes import Service, ServiceDiedError, Supervisor, end_leftovers
from forage_runtime.errors import StartError, UserError

FOREVER = "import time\nwhile True: time.sleep(1)"


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.stop()


def hide_seconds(why: str) -> str:
    """A sentence without the number in it that depends on the machine."""
    return re.sub(r"after \d+ s", "after … s", why)


def build_service(tmp_path: Path, code: str, **options: object) -> Service:
    return Service("worker", [sys.executable, "-c", code], tmp_path / "worker.log", **options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that died is started again soon."""
    monkeypatch.setattr(processes, "_PAUSE_S", 0.001)


def wait_until(supervisor: Supervisor, condition: Callable[[], bool]) -> None:
    """Let the supervisor go on until a condition is true."""
    waiting.wait_until(lambda: supervisor.tick() or condition())


def test_a_killed_service_is_restarted(tmp_path: Path) -> None:
    said: list[tuple[str, str]] = []
    supervisor = Supervisor(on_restart=lambda name, why: said.append((name, why)))
    supervisor.start(build_service(tmp_path, FOREVER))
    first = supervisor.pid("worker")
    assert first is not None
    os.kill(first, signal.SIGKILL)
    wait_until(supervisor, lambda: supervisor.pid("worker") not in (None, first))
    assert supervisor.restarts == {"worker": 1}
    supervisor.stop()
    assert [(name, hide_seconds(why)) for name, why in said] == [
        ("worker", "worker died after … s (killed by SIGKILL: is there too little memory?)")
    ]


def test_processes_left_by_a_killed_service_are_killed_before_its_restart(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    orphan = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {FOREVER!r}], start_new_session=True)\n"
        f"open({str(tmp_path / 'child')!r}, 'a').write(f'{{child.pid}}\\n')\n"
        "time.sleep(600)"
    )
    supervisor.start(build_service(tmp_path, orphan))
    file = tmp_path / "child"
    wait_until(supervisor, lambda: file.exists() and file.read_text().count("\n") == 1)
    child = psutil.Process(int(file.read_text()))
    pid = supervisor.pid("worker")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(supervisor, lambda: file.read_text().count("\n") == 2)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    second = psutil.Process(int(file.read_text().split()[1]))
    supervisor.stop()
    assert not second.is_running() or second.status() == psutil.STATUS_ZOMBIE


def test_a_job_with_exit_code_0_is_done_and_not_restarted(tmp_path: Path, supervisor: Supervisor) -> None:
    supervisor.start(build_service(tmp_path, "pass", job=True))
    wait_until(supervisor, lambda: supervisor.is_done("worker"))
    supervisor.tick()
    assert supervisor.restarts == {"worker": 0}


def test_a_users_error_stops_the_supervisor_with_the_services_message(tmp_path: Path, supervisor: Supervisor) -> None:
    code = (
        "import sys; print('forage worker: an earlier start', 'forage worker: no such corpus: give another', "
        "'no such index: build it', sep='\\n', file=sys.stderr); sys.exit(2)"
    )
    supervisor.start(build_service(tmp_path, code))
    with pytest.raises(UserError, match=r"^no such corpus: give another\nno such index: build it$"):
        wait_until(supervisor, lambda: False)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit(7)", r"^exit code 7, last line: none: the worker died 5 times in a row; see .*worker\.log$"),
        ("raise SystemExit(3)", r"^exit code 3, last line: none: the worker died 5 times in a row"),  # no trainer
        ("raise ValueError('3 heads')", r"^exit code 1, last line: ValueError: 3 heads: the worker died 5 times in a"),
        ("import os; os.kill(os.getpid(), 11)", r"^killed by SIGSEGV: the worker died 5 times in a row"),
    ],
)
def test_a_service_that_keeps_dying_is_an_error_that_says_why_and_names_its_log(
    tmp_path: Path, supervisor: Supervisor, code: str, reason: str
) -> None:
    supervisor.start(build_service(tmp_path, code))
    with pytest.raises(ServiceDiedError, match=reason):
        wait_until(supervisor, lambda: False)


def test_a_service_that_fails_again_and_again_is_given_up_however_long_it_lives(
    tmp_path: Path, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_HEALTHY_AFTER_S", 0.0)  # every life is a long one
    supervisor.start(build_service(tmp_path, "raise SystemExit(7)"))
    with pytest.raises(ServiceDiedError, match=r"the worker died 10 times in \d+ minutes"):
        wait_until(supervisor, lambda: False)
    assert supervisor.restarts == {"worker": 9}


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit(3)"], ids=["others end", "rolls back"])
def test_a_service_that_does_not_fail_is_started_again_however_often(
    tmp_path: Path, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(processes, "_HEALTHY_AFTER_S", 0.0)
    supervisor.start(build_service(tmp_path, f"import os, sys; {end}", job=True))
    wait_until(supervisor, lambda: supervisor.restarts["worker"] > processes._FAILURES)


def test_the_error_that_a_service_dies_of_comes_first(tmp_path: Path) -> None:
    restarts: list[str] = []
    failures: list[tuple[str, str]] = []
    supervisor = Supervisor(
        on_restart=lambda name, why: restarts.append(why), on_failure=lambda name, why: failures.append((name, why))
    )
    line = json.dumps({"event": "service_failed", "reason": "RuntimeError: no engine"})
    supervisor.start(build_service(tmp_path, f"import sys; print({line!r}); sys.exit(1)"))
    with pytest.raises(ServiceDiedError) as died:
        wait_until(supervisor, lambda: False)
    supervisor.stop()
    log = tmp_path / "worker.log"
    assert str(died.value) == f"RuntimeError: no engine: the worker died 5 times in a row; see {log}"
    assert failures == [("worker", str(died.value))]
    assert [hide_seconds(why) for why in restarts] == ["worker died after … s (RuntimeError: no engine)"] * 4


def test_a_service_that_no_other_try_would_start_ends_the_first(tmp_path: Path) -> None:
    failures: list[tuple[str, str]] = []
    supervisor = Supervisor(on_failure=lambda name, why: failures.append((name, why)))
    code = "import sys; print('forage worker: ValueError: 3 heads: no', file=sys.stderr); sys.exit(4)"
    supervisor.start(build_service(tmp_path, code))
    with pytest.raises(StartError) as refused:
        wait_until(supervisor, lambda: False)
    assert supervisor.restarts == {"worker": 0}
    supervisor.stop()
    log = tmp_path / "worker.log"
    assert str(refused.value) == f"ValueError: 3 heads: no; the whole error is in {log}"
    assert failures == [("worker", str(refused.value))]


@pytest.mark.parametrize(
    ("code", "reason"), [("2", "no such file"), ("4", "no such file"), ("7", "died 5 times in a row")]
)
def test_the_others_go_on_without_an_optional_service_that_cannot_start(
    tmp_path: Path, supervisor: Supervisor, code: str, reason: str
) -> None:
    program = f"import sys; print('forage worker: no such file', file=sys.stderr); sys.exit({code})"
    supervisor.start(build_service(tmp_path, program, optional=True))
    wait_until(supervisor, lambda: bool(supervisor.given_up))
    assert reason in supervisor.given_up["worker"]
    restarts = supervisor.restarts
    supervisor.tick()
    assert (supervisor.pid("worker"), supervisor.restarts) == (None, restarts)


def test_a_service_is_started_again_while_its_disk_is_full(
    tmp_path: Path, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [0]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free[0]))
    monkeypatch.setattr("forage_cli.local.processes._FULL_DISK_RETRY_S", 0.05)
    space = tmp_path / "space"
    code = f"import pathlib, time\nwhile pathlib.Path({str(space)!r}).exists(): time.sleep(0.1)\nraise SystemExit(1)"
    supervisor.start(build_service(tmp_path, code, folder=tmp_path))
    wait_until(supervisor, lambda: supervisor.restarts["worker"] > 7)
    space.touch()
    free[0] = 2**30
    wait_until(supervisor, lambda: supervisor.pid("worker") is not None)
    space.unlink()  # from here on it dies of something else
    with pytest.raises(ServiceDiedError, match="in a row"):
        wait_until(supervisor, lambda: False)


def test_a_disk_that_stays_full_is_an_error(
    tmp_path: Path, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    monkeypatch.setattr("forage_cli.local.processes._FULL_DISK_PATIENCE_S", 0.0)
    supervisor.start(build_service(tmp_path, "raise SystemExit(1)", folder=tmp_path))
    with pytest.raises(ServiceDiedError, match="in a row"):
        wait_until(supervisor, lambda: False)


def test_a_service_that_ignores_sigterm_is_killed_after_its_time_to_stop(tmp_path: Path) -> None:
    supervisor = Supervisor()
    code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True)\n{FOREVER}"
    supervisor.start(build_service(tmp_path, code, stop_s=0.3))
    wait_until(supervisor, lambda: "on" in (tmp_path / "worker.log").read_text())
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
    worker.wait(WAIT_S)
    assert not worker.is_running()


def start_and_kill_supervisor(folder: Path, code: str) -> psutil.Process:
    """A service with this code, whose supervisor was killed once it had printed a line."""
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom forage_cli.local.processes import Service, Supervisor\n"
        f"folder = Path({str(folder)!r})\ns = Supervisor(folder / 'processes.json')\n"
        f"s.start(Service('worker', [sys.executable, '-c', {code!r}], folder / 'log'))\n"
        "while not (folder / 'log').read_text(): time.sleep(0.02)\n"
        "print(s.pid('worker'), flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    return worker


def test_a_service_that_outlived_its_supervisor_is_ended_and_its_port_is_free(
    tmp_path: Path, free_address: Callable[[], str]
) -> None:
    host, _, port = free_address().rpartition(":")
    code = (
        "import signal, socket, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"server = socket.create_server(({host!r}, {port}))\n"
        f"child = subprocess.Popen([sys.executable, '-c', {FOREVER!r}], start_new_session=True)\n"
        "print(child.pid, flush=True)\ntime.sleep(600)"
    )
    worker = start_and_kill_supervisor(tmp_path, code)
    child = psutil.Process(int((tmp_path / "log").read_text()))
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port))) == 0, "the service should have outlived its supervisor"
    assert end_leftovers(tmp_path / "processes.json", grace_s=0.3) == sorted([worker.pid, child.pid])
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in (worker, child))
    socket.create_server((host, int(port))).close()
    assert not (tmp_path / "processes.json").exists()
    assert end_leftovers(tmp_path / "processes.json") == []


def test_a_stranger_with_the_id_of_an_earlier_process_is_left_alone(tmp_path: Path) -> None:
    record = tmp_path / "processes.json"
    with subprocess.Popen([sys.executable, "-c", FOREVER]) as stranger:
        try:
            started = psutil.Process(stranger.pid).create_time()
            gone = {"pid": stranger.pid, "started": started - 60}
            record.write_text(json.dumps({"supervisor": gone, "services": [{"token": "worker-1", **gone}]}))
            assert end_leftovers(record, grace_s=0.1) == []
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_the_processes_of_a_living_supervisor_are_left_alone(tmp_path: Path) -> None:
    record = tmp_path / "processes.json"
    supervisor = Supervisor(record)
    supervisor.start(build_service(tmp_path, FOREVER))
    try:
        pid = supervisor.pid("worker")
        services = json.loads(record.read_text())["services"]
        assert [entry["pid"] for entry in services] == [pid]
        assert end_leftovers(record, grace_s=0.1) == []
        assert supervisor.pid("worker") == pid
    finally:
        supervisor.stop()
    assert not record.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"supervisor": 3, "services": [{}]}'])
def test_a_damaged_record_ends_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "processes.json").write_text(text)
    assert end_leftovers(tmp_path / "processes.json") == []


def test_a_service_without_the_token_in_its_environment_is_killed_after_its_time_to_stop(tmp_path: Path) -> None:
    supervisor = Supervisor()
    code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True)\n{FOREVER}"
    replaced = f"import os, sys; os.execve(sys.executable, [sys.executable, '-c', {code!r}], {{}})"
    supervisor.start(build_service(tmp_path, replaced, stop_s=0.3))
    wait_until(supervisor, lambda: "on" in (tmp_path / "worker.log").read_text())
    worker = psutil.Process(supervisor.pid("worker"))
    supervisor.stop()
    assert not worker.is_running()
