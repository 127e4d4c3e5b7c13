"""`forage status` and the supervisor name processes that stand still, what they wait for, and where they are."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from typer.testing import CliRunner
from waiting import WAIT_S, wait_until

from forage_cli.local import inspection, run_watch
from forage_cli.local.family import RunProcess, fetch_stacks, list_processes
from forage_cli.local.inspection import ask_program, inspect_run
from forage_cli.local.processes import Service
from forage_cli.local.run_watch import Watch
from forage_cli.local.running import list_running
from forage_cli.local.stack import RECORD, STACKS, Program, Stack
from forage_cli.main import app
from forage_records.run_folder import STATE
from forage_runtime.clients import health
from forage_runtime.clients.health import ServiceHealth, ask_service, list_health_urls, open_client
from forage_runtime.settings import RedisSettings, Settings, TlsSettings, load_settings
from forage_runtime.telemetry.health import Health, serve_health
from forage_runtime.telemetry.stacks import FOLDER_VARIABLE

SERVICE = """
import ctypes, os, sys, threading, time
from forage_runtime.telemetry.health import Health, serve_health
from forage_runtime.telemetry.stacks import write_stacks_on_signal
from forage_runtime.telemetry.waits import idling, waiting
write_stacks_on_signal()
health = Health()
serve_health(sys.argv[1], health)
health.mark_started()
health.set_notes({"backpressure": "the trainer is slow"})
def look_for_gold():
    with waiting("gold", on="the retriever", limit_s=300, detail="nugget 7"):
        time.sleep(600)
def hang():
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.05)
    ctypes.PyDLL(None).sleep(600)  # holds the interpreter's lock: no thread of Python goes on
threading.Thread(target=hang, daemon=True).start()
look_for_gold()
"""


class OneServiceStack(Stack):
    """A stack whose one service is the program above."""

    def __init__(self, settings: Settings, program: Program = Program.REWARD) -> None:
        super().__init__(settings, [program])
        self.hang = self.folder / "hang"

    def _service(self, program: Program) -> Service:
        address = urlsplit(list_health_urls(self.settings)[program]).netloc
        command = [sys.executable, "-c", SERVICE, address, str(self.hang)]
        environment = {FOLDER_VARIABLE: str(self.folder / STACKS)}
        return Service(program, command, self.folder / "log", environment)


@pytest.fixture
def settings(tmp_path: Path, free_address: Callable[[], str]) -> Settings:
    services = ("reward.health", "retriever.http", "rollout.health", "trainer.health")
    addresses = [f"{name}_address={free_address()}" for name in services]
    return load_settings(None, [f"run.dir={tmp_path}", f"redis.url=redis://{free_address()}/0", *addresses])


@pytest.fixture
def start(settings: Settings) -> Iterator[Callable[[], OneServiceStack]]:
    stacks: list[OneServiceStack] = []

    def start(program: Program = Program.REWARD) -> OneServiceStack:
        stacks.append(OneServiceStack(settings, program))
        stacks[0].start()
        url = list_health_urls(settings)[program]
        wait_until(lambda: ask_service(url, settings.tls).is_ready, (stacks[0].folder / "log").read_text)
        return stacks[0]

    yield start
    for stack in stacks:
        pid = stack.supervisor.pid(stack.programs[0])
        if pid is not None:
            os.kill(pid, signal.SIGCONT)
        stack.stop()


def run_status(settings: Settings, *options: str) -> tuple[str, int]:
    """(output, exit code)"""
    file = settings.run.folder / "settings.yaml"
    result = CliRunner().invoke(app, ["status", "-c", str(file), *options])
    return result.output, result.exit_code


def limit_answers(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    for module in (health, inspection, run_watch):
        monkeypatch.setattr(module, "ANSWER_S", seconds)


def test_status_shows_notes_and_waits_with_their_end(settings: Settings, start: Callable[[], OneServiceStack]) -> None:
    stack = start()
    assert stack.folder.resolve() in {one.folder for one in list_running()}
    pid = stack.supervisor.pid(Program.REWARD)
    output, code = run_status(settings)
    assert code == 1, "the other services do not run"
    (row,) = (line.split() for line in output.splitlines() if line.startswith(" reward"))
    assert (row[0], row[2]) == ("reward", str(pid))
    assert row[1] in ("ready", "slow")
    assert "reward: note: the trainer is slow" in output
    assert "reward: waits for gold (nugget 7), on the retriever, since" in output
    assert "s; gives up in " in output


def test_a_service_that_answers_late_is_slow_and_not_silent(
    settings: Settings, start: Callable[[], OneServiceStack], monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    monkeypatch.setattr(health, "SLOW_S", 0.0)  # every answer takes longer
    assert inspect_run(settings)[Program.REWARD].is_ready
    output, _ = run_status(settings)
    (row,) = (line.split() for line in output.splitlines() if line.startswith(" reward"))
    assert row[:2] == ["reward", "slow"]
    assert re.search(r"^reward: slow: answered after \d+\.\d s$", output, re.MULTILINE)


@pytest.mark.parametrize(("took_s", "state", "lines"), [(1.9, "ready", []), (3.2, "slow", ["after 3.2 s"])])
def test_how_late_an_answer_is_follows_from_the_clock(
    free_address: Callable[[], str], took_s: float, state: str, lines: list[str]
) -> None:
    class LateHealth(Health):
        @property
        def notes(self) -> dict[str, str]:
            now[0] += took_s
            return {}

    now, late, address = [0.0], LateHealth(), free_address()
    late.mark_started()
    server = serve_health(address, late, waits=list)
    try:
        found = ask_service(f"http://{address}/readyz", TlsSettings(), lambda: now[0])
        assert (found.state, found.is_ready) == (state, True)
        assert found.list_lines() == [f"slow: answered {line}" for line in lines]
        late.wait_for("gold", "nugget 7")
        assert ask_service(f"http://{address}/readyz", TlsSettings(), lambda: now[0]).state == "not ready"
    finally:
        server.shutdown()
        server.server_close()


def ask_redis(url: str) -> ServiceHealth:
    with open_client(TlsSettings()) as client:
        return ask_program(Program.REDIS, load_settings(None, [f"redis.url={url}"]), client)


def test_redis_is_ready_where_it_answers_and_not_running_where_nobody_listens(
    own_redis: RedisSettings, free_address: Callable[[], str]
) -> None:
    found = ask_redis(own_redis.url)
    assert found.is_ready
    assert found.answered_s is not None
    assert ask_redis(f"redis://{free_address()}/0").state == "not running"


@pytest.mark.parametrize(
    ("reply", "state", "reason"),
    [
        (b"", "silent", "no answer from Redis"),
        (b"-LOADING Redis is loading the dataset in memory\r\n", "not ready", "is still reading its data from disk"),
    ],
)
def test_a_redis_that_reads_its_file_is_not_ready_and_one_that_says_nothing_is_silent(
    monkeypatch: pytest.MonkeyPatch, reply: bytes, state: str, reason: str
) -> None:
    limit_answers(monkeypatch, 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with connection:
                while connection.recv(4096):
                    connection.sendall(reply)

        threading.Thread(target=serve, daemon=True).start()
        found = ask_redis(f"redis://127.0.0.1:{server.getsockname()[1]}/0")
    assert found.state == state
    assert reason in found.explain()
    assert (found.answered_s is not None) is bool(reply), "an answer that it is not ready is a sign of life"


def test_a_stopped_process_is_named_and_not_waited_for(
    settings: Settings, start: Callable[[], OneServiceStack], monkeypatch: pytest.MonkeyPatch
) -> None:
    def note(url: str, tls: TlsSettings) -> ServiceHealth:
        asked.append(url)
        return ServiceHealth()

    stack, asked = start(), list[str]()
    monkeypatch.setattr(inspection, "ask_service", note)
    pid = stack.supervisor.pid(Program.REWARD)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    output, code = run_status(settings, "--stacks")
    assert code == 1
    assert f"is stopped: kill -CONT {pid} lets it go on" in output
    assert asked
    assert not any(settings.reward.health_address in url for url in asked)
    assert "it is stopped and cannot answer" in output


def test_the_supervisor_says_who_stands_still_and_who_goes_on(start: Callable[[], OneServiceStack]) -> None:
    stack, said = start(), list[str]()
    pid = stack.supervisor.pid(Program.REWARD)
    assert pid is not None

    def wait_for(text: str) -> None:
        wait_until(lambda: looking.tick(said.append) or any(text in sentence for sentence in said), said.copy)

    with Watch(stack) as looking:
        wait_until(lambda: looking.statuses[Program.REWARD].state in ("ready", "slow"))
        os.kill(pid, signal.SIGSTOP)
        wait_for(f"the reward: process {pid}")
        assert looking.statuses[Program.REWARD].state == "stopped"
        os.kill(pid, signal.SIGCONT)
        wait_for("the reward goes on")
        since = looking.statuses[Program.REWARD].since
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: looking.statuses[Program.REWARD].state == "restarting")
        wait_until(lambda: looking.tick(said.append) or looking.statuses[Program.REWARD].state in ("ready", "slow"))
        assert looking.statuses[Program.REWARD].since > since
        assert looking.statuses[Program.REWARD].restarts == 1


def test_a_process_that_hangs_in_c_code_is_named_and_shows_its_stacks(
    settings: Settings, start: Callable[[], OneServiceStack], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of Python runs in it any more: no thread gets the interpreter's lock."""
    stack, said = start(), list[str]()
    limit_answers(monkeypatch, 1.0)
    stack.hang.touch()
    with Watch(stack) as looking:
        wait_until(lambda: looking.tick(said.append) or said)
    assert "has not answered for 1 s" in said[0]
    output, code = run_status(settings, "--stacks")
    assert code == 1
    assert "silent" in output
    assert "in look_for_gold" in output
    assert "has not answered for" in output


def test_a_trainer_that_said_that_it_is_done_is_not_waited_for(
    settings: Settings, start: Callable[[Program], OneServiceStack], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = settings.run.folder / STATE
    state.parent.mkdir()
    state.write_text('{"phase": "done"}')  # of the part of the run before this one
    stack, said = start(Program.TRAINER), list[str]()
    limit_answers(monkeypatch, 1.0)
    stack.hang.touch()
    with Watch(stack) as looking:
        wait_until(lambda: looking.tick(said.append) or said)
        assert "the trainer" in said[0], "it has not said it yet"
        state.write_text('{"phase": "done"}')
        wait_until(lambda: looking.statuses[Program.TRAINER].state == "done")
    output, _ = run_status(settings)
    (row,) = (line.split() for line in output.splitlines() if line.startswith(" trainer"))
    assert row[1] == "done"
    assert "has not answered" not in output


def test_a_process_that_would_be_ended_by_the_signal_does_not_get_it(tmp_path: Path) -> None:
    with psutil.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        (tmp_path / f"{child.pid}.txt").touch()  # left by another process with its id
        texts = fetch_stacks([RunProcess("reward", child.pid, "python", "running", True)], tmp_path)
        assert texts == {child.pid: "it has no Python stacks to show"}
        assert child.poll() is None
        child.kill()


def test_a_dead_service_is_named(settings: Settings, start: Callable[[], OneServiceStack]) -> None:
    stack = start()
    pid = stack.supervisor.pid(Program.REWARD)
    assert pid is not None
    psutil.Process(pid).kill()
    psutil.Process(pid).wait(WAIT_S)
    output, code = run_status(settings)  # its supervisor does not tick meanwhile
    (row,) = (line.split() for line in output.splitlines() if line.startswith(" reward"))
    assert (row[1], code) == ("dead", 1)
    assert "not running" in output


def test_nothing_runs(settings: Settings) -> None:
    settings.run.folder.mkdir()
    (settings.run.folder / "settings.yaml").write_text(settings.to_yaml())
    output, code = run_status(settings)
    assert code == 1
    assert output.count("not running") == len(Program)
    assert list_processes(settings.run.folder / RECORD) == {}
