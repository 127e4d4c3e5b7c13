"""`forage console` as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_S

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    (folder / "one").mkdir(parents=True)
    (folder / "one/settings.yaml").write_text("{}")
    return folder


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "import sys; sys.argv[0] = 'forage'; " + _RUN, *arguments]
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **streams))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


_RUN = (
    "from pathlib import Path; from forage_cli.local import console; console.PAGE = Path(sys.executable); "
    "from forage_cli.main import main; main()"
)
"""The command, in a checkout whose pages may not be built."""


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line that is for people; the log lines of the service are JSON."""
    assert process.stdout is not None
    while (line := process.stdout.readline()).startswith("{"):
        pass
    return line


def test_it_serves_a_folder_until_ctrl_c(start: Start, runs: Path, free_address: Callable[[], str]) -> None:
    address = free_address()
    process = start("console", str(runs / "one"), "--address", address)
    line = read_line(process)
    assert line.startswith(f"console  http://{address}/runs/one  shows {runs}; Ctrl-C stops it")
    with urllib.request.urlopen(f"http://{address}/readyz", timeout=WAIT_S) as reply:
        assert reply.status == 200
    again = start("console", str(runs), "--address", address)
    assert read_line(again) == f"these runs are shown already: http://{address}\n"
    assert again.wait(WAIT_S) == 0
    (runs.parent / "others").mkdir()
    other = start("console", str(runs.parent / "others"), "--address", address)
    assert "a console of other runs is at" in read_line(other)
    assert other.wait(WAIT_S) == 2
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the console gets it, too
    assert process.wait(WAIT_S) == 0
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://{address}/healthz", timeout=WAIT_S)


def test_other_machines_are_let_in_by_a_token_only(start: Start, runs: Path, free_address: Callable[[], str]) -> None:
    address = free_address()
    port = address.rpartition(":")[2]
    refused = start("console", str(runs), "--address", f"0.0.0.0:{port}")
    assert "console.auth_token_file is not set: give it a file with a token" in read_line(refused)
    assert refused.wait(WAIT_S) == 2
    token = runs.parent / "token"
    token.write_text("secret")
    served = start("console", str(runs), "--address", f"0.0.0.0:{port}", "--token-file", str(token))
    assert f"http://{address}  shows {runs}; sign in with the token of {token}" in read_line(served)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://{address}/api/runs", timeout=WAIT_S)
