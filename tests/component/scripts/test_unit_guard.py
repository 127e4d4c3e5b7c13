"""tests/unit/conftest.py fails unit tests that connect, bind, start a process or sleep, and no others."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

TESTS = """
import asyncio, multiprocessing, socket, subprocess, time
import pytest

def swallow(call):
    try:
        call()
    except BaseException:
        pass

def test_binds(): socket.create_server(("127.0.0.1", 0))
def test_connects(): swallow(lambda: socket.create_connection(("127.0.0.1", 1)))
def test_starts_a_process(): swallow(lambda: subprocess.run(["true"]))
def test_starts_a_worker(): multiprocessing.get_context("spawn").Process(target=print).start()
def test_sleeps(): time.sleep(0.001)
def test_sleeps_in_a_loop(): asyncio.run(asyncio.sleep(0.001))

def test_may_yield(): asyncio.run(asyncio.sleep(0))
def test_may_open_files(tmp_path): (tmp_path / "a").write_text("b")
"""


def test_planted_costs_fail_and_the_rest_passes(tmp_path: Path, repository: Path) -> None:
    shutil.copy(repository / "tests/unit/conftest.py", tmp_path)
    (tmp_path / "test_planted.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "."]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = [line.split(" - ")[0] for line in ended.stdout.splitlines()]
    passed = {line.rpartition("::")[2] for line in lines if line.startswith("PASSED")}
    failed = {line.rpartition("::")[2] for line in lines if line.startswith(("FAILED", "ERROR"))}
    assert passed - failed == {"test_may_yield", "test_may_open_files"}, ended.stdout
    assert failed == {
        "test_binds",
        "test_connects",
        "test_starts_a_process",
        "test_starts_a_worker",
        "test_sleeps",
        "test_sleeps_in_a_loop",
    }, ended.stdout
    assert "move it to tests/component" in ended.stdout
