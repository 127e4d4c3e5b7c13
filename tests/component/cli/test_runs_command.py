"""`forage runs list|show|diff|rm` and `forage logs` on real folders, with a supervisor that runs one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import Result
from run_folders import write_run
from typer.testing import CliRunner

from forage_cli.commands.runs.logs import LogReader
from forage_cli.local.processes import Service, Supervisor
from forage_cli.local.stack import RECORD
from forage_cli.main import app
from forage_runtime.errors import DataError, UserError
from forage_runtime.settings import load_settings

STEP = {"reward_mean": 0.5, "em_mean": 0.25, "kl_ref": 0.001, "time": 1.0}
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two finished runs of different seeds; `latest` is the second one."""
    folder = tmp_path / "runs"
    for position, (name, em) in enumerate((("first", 0.5), ("second", 0.75))):
        run = folder / name
        run.mkdir(parents=True)
        write_run(run, {"before": [{"em": 0.0}], "after": [{"em": em}]}, [{**STEP, "step": n} for n in (1, 2)])
        overrides = [f"run.id={name}", f"run.dir={folder}", f"run.seed={position}", "trainer.total_training_steps=2"]
        overrides += ["redis.url=redis://user:hidden-word@host:6379/0", f"data.corpus={run}/corpus.jsonl"]
        (run / "settings.yaml").write_text(load_settings(None, overrides, {}).to_yaml())
        os.utime(run / "settings.yaml", (position, position))
        (run / "state.json").write_text('{"phase": "done"}')
        (run / "summary.json").write_text(json.dumps({"minutes": 3.5 + position, "groups_lost": 0}))
    (folder / "latest").symlink_to("second")
    return folder


@pytest.fixture
def supervise(runs: Path) -> Iterator[Callable[[str], Supervisor]]:
    """Run a service of a run, as a command does."""
    started: list[Supervisor] = []

    def start(name: str) -> Supervisor:
        supervisor = Supervisor(runs / name / RECORD)
        started.append(supervisor)
        supervisor.start(Service("trainer", SLEEP, runs / name / "logs/trainer.log"))
        return supervisor

    yield start
    for supervisor in started:
        supervisor.stop()


def invoke(*arguments: object, stdin: str = "") -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), input=stdin)


def read_json(*arguments: object) -> object:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


def test_list_shows_the_runs_from_old_to_new_and_which_is_active(
    runs: Path, supervise: Callable[[str], Supervisor]
) -> None:
    supervise("first")
    states = read_json("runs", "list", "--runs", runs)
    assert isinstance(states, list)
    assert [(one["id"], one["steps"], one["total_steps"], one["active"]) for one in states] == [
        ("first", 2, 2, True),
        ("second", 2, 2, False),
    ]
    lines = invoke("runs", "list", "--runs", runs).stdout.splitlines()
    assert lines[1].split()[:6] == ["first", "active:", "done", "2/2", "0", "0.5"]
    assert lines[2].split()[:5] == ["second", "done", "2/2", "0", "0.75"]


def test_an_empty_folder_has_no_runs_and_one_that_is_missing_is_an_error(tmp_path: Path) -> None:
    assert "no runs in" in invoke("runs", "list", "--runs", tmp_path).stdout
    assert isinstance(invoke("runs", "list", "--runs", tmp_path / "none").exception, UserError)


def test_show_prints_metrics_and_changed_settings_without_credentials(runs: Path) -> None:
    shown = read_json("runs", "show", "--runs", runs)
    assert isinstance(shown, dict)
    assert (shown["id"], shown["metrics"]["em_after"], shown["metrics"]["minutes"]) == ("second", 0.75, 4.5)
    assert shown["settings"]["run.seed"] == 1
    assert "trainer.max_staleness" not in shown["settings"], "it has its default"
    text = invoke("runs", "show", "first", "--runs", runs).stdout
    assert "hidden-word" not in text + json.dumps(shown)
    assert "last step: reward_mean" in text
    assert invoke("runs", "show", runs / "first").stdout == text, "a folder names a run, too"


def test_diff_shows_settings_and_metrics_that_differ(runs: Path) -> None:
    compared = read_json("runs", "diff", "first", "second", "--runs", runs)
    assert isinstance(compared, dict)
    assert compared["settings"] == {"run.seed": [0, 1]}, "their ids and own files are no difference"
    assert compared["metrics"]["em_after"] == [0.5, 0.75]
    assert "the settings are equal" in invoke("runs", "diff", "first", "first", "--runs", runs).stdout


@pytest.mark.parametrize("command", [["show"], ["diff", "first"], ["rm", "--yes"], ["rm", "--yes", "first"]])
def test_an_unknown_run_is_an_error_that_lists_those_that_there_are(runs: Path, command: list[str]) -> None:
    result = invoke("runs", *command, "third", "--runs", runs)
    assert isinstance(result.exception, DataError)
    assert str(result.exception) == (
        f"there is no run 'third' in {runs}: it has first, second; --runs names another folder"
    )
    assert (runs / "first").is_dir()


def test_a_run_with_damaged_settings_is_an_error(runs: Path) -> None:
    (runs / "first/settings.yaml").write_text("run: [")
    error = invoke("runs", "show", "first", "--runs", runs).exception
    assert isinstance(error, DataError)
    assert "settings.yaml is damaged" in str(error)
    assert invoke("runs", "rm", "first", "--yes", "--runs", runs).exit_code == 0, "it can be removed"


def test_rm_asks_and_removes_the_link_too(runs: Path) -> None:
    asked = invoke("runs", "rm", "latest", "--runs", runs, stdin="n\n")
    assert (asked.exit_code, (runs / "second").is_dir()) == (1, True)
    assert "2 steps" in asked.stdout
    assert invoke("runs", "rm", "latest", "--runs", runs, stdin="y\n").exit_code == 0
    assert [file.name for file in runs.iterdir()] == ["first"]
    assert invoke("runs", "rm", "first", "--yes", "--runs", runs).exit_code == 0
    assert list(runs.iterdir()) == []


def test_rm_refuses_a_run_in_use(runs: Path, supervise: Callable[[str], Supervisor]) -> None:
    supervisor = supervise("second")
    error = invoke("runs", "rm", "first", "second", "--yes", "--runs", runs).exception
    assert isinstance(error, UserError)
    assert f"the run second is in use by process {os.getpid()}" in str(error)
    assert (runs / "first").is_dir(), "nothing was removed"
    supervisor.stop()
    assert invoke("runs", "rm", "second", "--yes", "--runs", runs).exit_code == 0


def test_rm_refuses_a_run_whose_services_outlived_their_command(runs: Path) -> None:
    environment = {**os.environ, "FORAGE_RUN_TOKEN": "trainer-1"}
    with subprocess.Popen(SLEEP, env=environment) as service:
        described = {"pid": service.pid, "started": psutil.Process(service.pid).create_time()}
        record = {"supervisor": {"pid": 1, "started": 0.0}, "services": [{"token": "trainer-1", **described}]}
        (runs / "first" / RECORD).write_text(json.dumps(record))
        error = invoke("runs", "rm", "first", "--yes", "--runs", runs).exception
        service.kill()
    assert isinstance(error, UserError)
    assert f"left behind ({service.pid})" in str(error)


def write_log(run: Path, service: str, *lines: str) -> Path:
    file = run / "logs" / f"{service}.log"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


@pytest.mark.parametrize("name", ["linked", "project", "."])
def test_rm_removes_only_what_lies_in_the_folder_of_runs(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    work, outside = tmp_path / "work", tmp_path / "outside"
    for folder in (work, work / "project", outside):
        folder.mkdir()
        (folder / "settings.yaml").write_text("run: {}")
    (runs / "linked").symlink_to(outside)
    monkeypatch.chdir(work)
    done = invoke("runs", "rm", name, "--yes", "--runs", str(runs))
    assert "is not directly in" in str(done.exception)
    for folder in (work, work / "project", outside):
        assert (folder / "settings.yaml").is_file()


@pytest.mark.parametrize(
    "record",
    [
        '{"supervisor":',
        "[]",
        "[" * 50_000,
        '{"supervisor": {"pid": 1, "started": 0}, "services": [{"token": "trainer-a", "pid": 1}]}',
        '{"supervisor": {"pid": 1e999, "started": 0}, "services": []}',
    ],
)
def test_rm_refuses_a_run_whose_processes_are_not_known(runs: Path, record: str) -> None:
    (runs / "first" / RECORD).write_text(record)
    done = invoke("runs", "rm", "first", "--yes", "--runs", str(runs))
    assert f"{RECORD}, which names the run's processes, is damaged" in str(done.exception)
    assert (runs / "first/settings.yaml").is_file()
    assert invoke("runs", "list", "--runs", str(runs)).exit_code == 0


def test_a_pipe_where_a_file_is_expected_hangs_nothing(runs: Path) -> None:
    for file in (RECORD, "metrics.jsonl"):
        (runs / "first" / file).unlink(missing_ok=True)
        os.mkfifo(runs / "first" / file)
    assert invoke("runs", "list", "--runs", str(runs)).exit_code == 0
    assert "is damaged" in str(invoke("runs", "rm", "first", "--yes", "--runs", str(runs)).exception)


@pytest.mark.parametrize("settings", ["{", "run: &a {x: *a}", "- 1", "\x00"])
def test_a_damaged_run_hides_no_other(runs: Path, settings: str) -> None:
    (runs / "first/settings.yaml").write_text(settings)
    listed = invoke("runs", "list", "--runs", str(runs))
    assert listed.exit_code == 0
    assert f"{runs / 'first/settings.yaml'} is damaged" in listed.output
    assert "second" in listed.output
    assert [run["id"] for run in json.loads(invoke("runs", "list", "--json", "--runs", str(runs)).stdout)] == ["second"]


def test_odd_values_of_a_run_are_shown_as_they_are(runs: Path) -> None:
    (runs / "first/settings.yaml").write_text("run: {id: first}\nday: 2026-01-01\n")
    (runs / "first/metrics.jsonl").write_text('{"step": 1e999}\n{"step": "x"}\n')
    (runs / "first/summary.json").write_text("[" * 30_000)
    shown = invoke("runs", "show", "first", "--json", "--runs", str(runs))
    assert shown.exit_code == 0
    assert json.loads(shown.stdout)["settings"]["day"] == "2026-01-01"
    assert json.loads(shown.stdout)["steps"] == 2


def test_logs_prints_the_last_lines_of_the_run_that_wrote_last(runs: Path) -> None:
    os.utime(write_log(runs / "second", "trainer", "old"), (1, 1))
    write_log(runs / "first", "trainer", "one", "two", "three \x1b[31m")
    write_log(runs / "first", "reward", "scored")
    shown = invoke("logs", "trainer", "-n", 2, "--runs", runs)
    assert (shown.exit_code, shown.stdout) == (0, "two\nthree \\u001b[31m\n")
    every = invoke("logs", "--runs", runs).stdout.splitlines()
    assert every == ["reward    scored", "trainer   one", "trainer   two", "trainer   three \\u001b[31m"]
    assert invoke("logs", "trainer", "--run", "second", "--runs", runs).stdout == "old\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["librarian"], "there is no service 'librarian': give one of redis, reward, retriever"),
        (["trainer"], "has a log: start one with"),
        (["trainer", "--run", "third"], "there is no run 'third'"),
        (["trainer", "--run", "first"], "has no log of trainer yet: its services have not started here"),
    ],
)
def test_logs_that_do_not_exist_are_an_error(runs: Path, arguments: list[str], sentence: str) -> None:
    error = invoke("logs", *arguments, "--runs", runs).exception
    assert isinstance(error, UserError)
    assert sentence in str(error)


def test_logs_of_another_service_are_named(runs: Path) -> None:
    write_log(runs / "first", "reward", "scored")
    error = invoke("logs", "trainer", "--run", "first", "--runs", runs).exception
    assert "there are those of reward" in str(error)


def test_following_ends_with_the_run_and_shows_what_was_written_meanwhile(
    runs: Path, supervise: Callable[[str], Supervisor]
) -> None:
    supervisor = supervise("first")
    file = write_log(runs / "first", "trainer", "before")

    def write_and_stop() -> None:
        with file.open("a") as log:
            log.write("meanwhile\nhalf a line")
        supervisor.stop()

    timer = threading.Timer(1.0, write_and_stop)
    timer.start()
    shown = invoke("logs", "trainer", "-f", "--run", "first", "--runs", runs)
    timer.join()
    assert shown.stdout.splitlines() == ["before", "meanwhile", "half a line"]


def test_a_reader_waits_for_the_file_and_for_the_end_of_a_line_and_notices_a_new_file(tmp_path: Path) -> None:
    file = tmp_path / "trainer.log"
    reader = LogReader(file, lines=1)
    assert list(reader.read()) == []
    file.write_text("one\ntwo\nthr")
    assert list(reader.read()) == ["one", "two"], "lines that come while it waits are all new"
    file.write_text("one\ntwo\nthree\n")
    assert list(reader.read()) == ["three"]
    file.write_text("new\n")
    assert list(reader.read()) == ["new"]
