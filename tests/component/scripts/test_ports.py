"""Ports of tests: no two processes get the same one, and none that is in use."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import ports
import pytest
from ports import reserve_ports


def test_two_processes_share_a_range_without_meeting(repository: Path, tmp_path: Path) -> None:
    code = (
        "import ports, sys; ports.FIRST, ports.LAST = 10_000, 10_040; print(*(ports.reserve_ports() for _ in range(9)))"
    )
    code += "; sys.stdout.flush(); sys.stdin.read()"
    command = [sys.executable, "-c", code]
    environment = {"PYTHONPATH": str(repository / "tests/support"), "TMPDIR": str(tmp_path)}
    processes = [
        subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        for _ in range(3)
    ]
    found = [port for process in processes if process.stdout for port in process.stdout.readline().split()]
    for process in processes:
        process.communicate("")
    assert (len(found), len(set(found))) == (27, 27)


def test_a_range_with_a_port_in_use_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = reserve_ports(8)
    monkeypatch.setattr(ports, "FIRST", start)
    monkeypatch.setattr(ports, "LAST", start + 8)
    with pytest.raises(OSError, match="no 4 consecutive ports"):
        reserve_ports(4)  # this process holds them: each is a test's own
    monkeypatch.setattr(ports, "_LOCKS", tmp_path / "locks")
    with socket.create_server(("127.0.0.1", start + 1)):
        assert reserve_ports(4) == start + 4, "the first four have one that listens"
