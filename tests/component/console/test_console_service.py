"""The console as a process: its streams of events, its pages' replies, its end."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from run_folders import write_lines, write_run
from waiting import WAIT_S, wait_until

StartService = Callable[..., subprocess.Popen[str]]
WaitUntilReady = Callable[[subprocess.Popen[str], str], None]


@dataclass(frozen=True)
class Service:
    process: subprocess.Popen[str]
    address: str
    runs: Path

    def request(self, path: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.address, timeout=WAIT_S)
        connection.request("GET", path)
        return connection.getresponse()

    def read(self, path: str) -> tuple[int, str]:
        with closing(self.request(path)) as reply:
            return reply.status, reply.read().decode()

    def count_streams(self) -> float:
        match = re.search(r"^forage_console_streams (\S+)$", self.read("/metrics")[1], re.MULTILINE)
        assert match is not None
        return float(match[1])


def read_event(stream: http.client.HTTPResponse) -> dict[str, Any]:
    """Read the data of the next event."""
    while True:
        line = stream.readline()
        assert line, "the stream has ended"
        if line.startswith(b"data: "):
            event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
            return event


@pytest.fixture
def service(
    tmp_path: Path, start_service: StartService, wait_until_ready: WaitUntilReady, free_address: Callable[[], str]
) -> Service:
    runs = tmp_path / "runs"
    (runs / "one").mkdir(parents=True)
    write_run(runs / "one", {}, [{"step": 1}])
    address = free_address()
    process = start_service("console", f"console.http_address={address}", f"run.dir={runs}")
    wait_until_ready(process, address)
    return Service(process, address, runs)


def test_a_page_hears_of_a_step_its_end_is_noticed_and_so_is_that_of_the_service(service: Service) -> None:
    stream = service.request("/api/runs/one/events")
    assert (stream.status, stream.headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
    assert read_event(stream)["step"] == 1
    with (service.runs / "one/metrics.jsonl").open("a") as file:
        file.write(write_lines([{"step": 2}]))
    assert read_event(stream)["step"] == 2
    every = service.request("/api/events")
    assert read_event(every)["run"] == "one"
    assert service.count_streams() == 2
    stream.close()
    every.close()
    wait_until(lambda: service.count_streams() == 0, "the service sees that nobody listens")
    stream = service.request("/api/runs/one/events")
    read_event(stream)
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(WAIT_S) == 0, "it ends although a page listens"
