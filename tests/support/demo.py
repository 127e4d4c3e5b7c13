"""A `forage demo` under test: started as a user starts it, in a folder of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

if TYPE_CHECKING:
    from forage_queue.checker.check import Report

LIMIT_S = 1500.0
"""Ends a wait that hangs, on a machine of any speed."""


T = TypeVar("T")
REPOSITORY = Path(__file__).resolve().parents[2]
FORAGE = [str(REPOSITORY / ".venvs/cli/bin/python"), "-c", "from forage_cli.main import main; main()"]
PROGRAMS = ("trainer", "rollout", "reward", "retriever", "redis")


class Demo:
    """One run's command and folder. `steps` counts the optimizer steps that it has reported."""

    def __init__(self, folder: Path, base_port: int, settings: list[str]) -> None:
        self.base_port = base_port
        self.runs = folder / "runs"
        self._settings = [f"run.dir={self.runs}", *settings]
        self._log = folder / "demo.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        command = [*FORAGE, "demo", *options, *self._settings]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=REPOSITORY, start_new_session=True)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not started"
        return self._process

    @property
    def run(self) -> Path:
        return (self.runs / "latest").resolve()

    @property
    def metrics(self) -> dict[str, str]:
        """Job → address of its metrics."""
        offsets = {"retriever": 10, "reward": 21, "rollout": 31, "trainer": 41}
        return {job: f"127.0.0.1:{self.base_port + offset}" for job, offset in offsets.items()}

    @property
    def output(self) -> str:
        return self._log.read_text()

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.run / "summary.json").read_text())
        return summary

    @property
    def history(self) -> Report:
        """What the recorded operations of the run say (run.record_history=true)."""
        from forage_queue.checker.check import check

        return check(self.run)

    @property
    def steps(self) -> int:
        file = self.run / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def wait_for(self, condition: Callable[[], T], timeout_s: float = LIMIT_S) -> T:
        deadline = time.monotonic() + timeout_s
        while not (result := condition()):
            assert self.process.poll() is None, f"the demo ended early:\n{self.output[-3000:]}"
            assert time.monotonic() < deadline, f"it did not happen in time:\n{self.output[-3000:]}"
            time.sleep(0.25)
        return result

    def finish(self, timeout_s: float = LIMIT_S) -> int:
        return self.process.wait(timeout_s)

    def kill(self, program: str) -> None:
        """kill -9 the process that the supervisor started for a program."""
        self._find(program).kill()

    @contextmanager
    def pause(self, program: str) -> Iterator[None]:
        """Freeze a program and all that it started, so that the run cannot end meanwhile."""
        process = self._find(program)
        frozen = [process, *process.children(recursive=True)]
        for member in frozen:
            member.suspend()
        try:
            yield
        finally:
            for member in frozen:
                member.resume()

    def _find(self, program: str) -> psutil.Process:
        for child in psutil.Process(self.process.pid).children():
            if _read_environment(child).get("FORAGE_RUN_TOKEN", "").startswith(f"{program}-"):
                return child
        raise AssertionError(f"no {program} process runs")

    def interrupt(self) -> None:
        """Interrupt the demo as Ctrl-C does."""
        os.kill(self.process.pid, signal.SIGINT)

    def list_leftovers(self) -> list[str]:
        """Command lines of processes of this run that still live."""
        names = [f"{self.runs}/{path.name}" for path in self.runs.iterdir()] if self.runs.exists() else []
        return [
            " ".join(process.info["cmdline"])
            for process in psutil.process_iter(["cmdline"])
            if any(name in " ".join(process.info["cmdline"] or []) for name in names)
        ]

    def end(self) -> None:
        """End all processes of the run after a test, whether it passed or failed."""
        if self._process is not None and self._process.poll() is None:
            self.interrupt()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()


def _read_environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}
