"""A process that is fuzzed: its start, its health, its memory, its log."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
MODULES = f"{REPOSITORY / 'lab'}:{REPOSITORY / 'tests/support'}"
"""Where the programs that read hostile inputs find this package and the helpers of tests."""
_START_S = 180.0
_HARMLESS = re.compile(r"WARNING: All log messages before absl|W\d{4} .* torch/")
"""What libraries write at their import, before any log of ours."""


def find_python(environment: str) -> Path:
    """The interpreter of a service's environment."""
    return REPOSITORY / f".venvs/{environment}/bin/python"


class Process:
    """A program in the environment of a service, with its log in a file of the folder."""

    def __init__(self, environment: str, arguments: Sequence[str], folder: Path, name: str, pipe: bool = False) -> None:
        """
        Args:
            pipe: whether the program is talked to through its standard input and output.
        """
        self._command = [str(find_python(environment)), *arguments]
        self._folder = folder
        self._pipe = subprocess.PIPE if pipe else None
        self.log = folder / f"{name}.log"
        self._read_to = 0

    def start(self) -> None:
        """Start the program, or start it again after it has ended."""
        # Libraries would warn of encodings in the log, where any unknown line is a fault.
        left_out = ("FORAGE__", "PYTHONWARNDEFAULTENCODING")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": MODULES, "HF_HUB_OFFLINE": "1"}
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=environment,
                stdin=self._pipe or subprocess.DEVNULL,
                stdout=self._pipe or log,
                stderr=log,
            )

    @property
    def is_alive(self) -> bool:
        return self.popen.poll() is None

    def describe_end(self) -> str:
        """How the process ended, with the end of its log."""
        tail = self.log.read_text(errors="replace")[-1500:] if self.log.exists() else ""
        return f"ended with exit code {self.popen.returncode}: {tail}"

    def measure_memory(self) -> int:
        """Resident bytes of the process and those that it started."""
        try:
            whole = psutil.Process(self.popen.pid)
            return sum(one.memory_info().rss for one in (whole, *whole.children(recursive=True)) if one.is_running())
        except psutil.Error:
            return 0

    def wait_for_port(self, port: int) -> None:
        """Wait until a program of the process listens on a port of loopback."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if not self.is_alive:
                raise RuntimeError(f"{self._command[1:4]} {self.describe_end()}")
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.05)
        raise RuntimeError(f"{self._command[1:4]} does not listen on port {port} after {_START_S:g} s")

    def find_bad_lines(self) -> list[str]:
        """Lines that the log has got since the last call and that are no JSON, or tell of an unforeseen error."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as stream:
            stream.seek(self._read_to)
            content = stream.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._read_to += len(whole)
        return [line for line in whole.decode(errors="replace").splitlines() if _is_bad(line)]

    def end(self) -> None:
        """Kill the process and those that it started."""
        if not hasattr(self, "popen"):
            return
        if self.is_alive:
            try:
                family = [*psutil.Process(self.popen.pid).children(recursive=True), psutil.Process(self.popen.pid)]
            except psutil.Error:
                family = []
            for member in family:
                try:
                    member.kill()
                except psutil.Error:
                    continue
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()


def _is_bad(line: str) -> bool:
    if not line.strip() or _HARMLESS.match(line):
        return False
    try:
        row = json.loads(line)
    except ValueError:
        return True
    return not isinstance(row, dict) or "exception" in row
