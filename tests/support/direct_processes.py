"""Processes of the direct transport: a trainer that sends files, and engines that receive them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_S, wait_until

from forage_proto.v1.trajectory_pb2 import Policy, PolicyPart

SOON_S = WAIT_S
Start = Callable[..., Any]


class Process:
    """A process that obeys lines of JSON, one answer each."""

    def __init__(self, python: Path, script: Path, options: dict[str, Any]) -> None:
        command = [str(python if python.exists() else sys.executable), str(script), json.dumps(options)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        self._has_begun = False
        self.is_unharmed = True
        self._unread = 0

    @property
    def is_reusable(self) -> bool:
        """Whether the next test may use it."""
        return self.is_unharmed and not self._unread

    @property
    def hello(self) -> dict[str, Any]:
        """Its first line, once it has started."""
        if not self._has_begun:
            self._hello = self._read_line(120)
            self._has_begun = True
        return self._hello

    def order(self, **fields: Any) -> None:
        assert self.hello is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(fields).encode() + b"\n")
        self._process.stdin.flush()
        self._unread += 1

    def read(self, limit_s: float = SOON_S) -> dict[str, Any]:
        assert self.hello is not None
        line = self._read_line(limit_s)
        self._unread -= 1
        return line

    def _read_line(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], limit_s)[0], f"nothing within {limit_s} s"
        return dict(json.loads(self._process.stdout.readline()))

    def ask(self, **fields: Any) -> dict[str, Any]:
        self.order(**fields)
        return self.read()

    def signal(self, number: signal.Signals) -> None:
        self.is_unharmed = False
        self._process.send_signal(number)

    def end(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self.is_unharmed = False
        self._process.stdin.close()
        last = self.read()
        assert self._process.wait(SOON_S) == 0
        return last

    def kill(self) -> None:
        self.is_unharmed = False
        self._process.kill()
        self._process.wait(SOON_S)


class Engine(Process):
    """An engine that receives into a folder of its own."""

    folder: Path

    def __init__(self, repository: Path, options: dict[str, Any]) -> None:
        python = repository / ".venvs/rollout/bin/python"
        super().__init__(python, repository / "tests/support/direct_engine.py", options)
        self._transfers = 0

    def begin(self, port: int, source: Path, name: str = "w") -> Path:
        """Ask for a file under the digest `name`; returns where it will be."""
        self._transfers += 1
        folder = self.folder / str(self._transfers)
        folder.mkdir(parents=True)
        self.order(port=port, folder=str(folder), files=[["w", name, source.stat().st_size]])
        return folder / "w"

    def receive(self, trainer: Process, source: Path) -> Path:
        """Receive a file, which must succeed; returns where it is."""
        target = self.begin(trainer.hello["port"], source)
        assert self.read()["failure"] == ""
        return target

    def receive_soon(self, trainer: Process, source: Path) -> Path:
        """Receive a file once the sender is not avoided any more."""

        def receive() -> Path | None:
            target = self.begin(trainer.hello["port"], source)
            return None if self.read()["failure"] else target

        target = wait_until(receive)
        assert target is not None
        return target

    def wait_for_bytes(self, count: int) -> None:
        """Return once the transfer that was begun last is in its middle."""
        folder, deadline = self.folder / str(self._transfers), time.monotonic() + SOON_S
        while not any(_measure(file) > count for file in folder.glob(".direct-*/w")):
            assert time.monotonic() < deadline
            time.sleep(0.0005)  # as short as a transfer's middle is


def _measure(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


@pytest.fixture(scope="module")
def pool() -> Iterator[dict[str, list[Process]]]:
    """Processes that a test has left as they were, by kind and options: importing torch takes most of a test's time."""
    idle: dict[str, list[Process]] = {}
    yield idle
    for processes in idle.values():
        for process in processes:
            process.kill()


@pytest.fixture
def stall_s() -> float:
    """How long a transfer may stand still: the limit of no test that stops nobody."""
    return 3600.0


@pytest.fixture
def start(repository: Path, tmp_path: Path, pool: dict[str, list[Process]], stall_s: float) -> Iterator[Start]:
    """Starts a "trainer" or an "engine", with the arguments of its class."""
    started: list[tuple[str, Process]] = []

    def start_one(kind: str, **options: Any) -> Process:
        options = {"stall_s": stall_s} | options
        key = json.dumps([kind, options])
        if pool.get(key):
            process = pool[key].pop()
        elif kind == "trainer":
            process = Process(Path(sys.executable), repository / "tests/support/direct_trainer.py", options)
        else:
            process = Engine(repository, options)
        if isinstance(process, Engine):
            process.folder = tmp_path / f"engine-{len(started)}"
        started.append((key, process))
        return process

    yield start_one
    for key, process in started:
        if process.is_reusable:
            process.ask(offer={}, gpu="")
            pool.setdefault(key, []).append(process)
        else:
            process.kill()


def begin_all(engines: list[Engine], trainer: Process, source: Path) -> list[Path]:
    """Ask for a file with several engines at once; returns where it will be."""
    assert [engine.hello for engine in engines]  # one that starts would let the others' transfers end
    return [engine.begin(trainer.hello["port"], source) for engine in engines]


def write(file: Path, size: int) -> Path:
    """A file whose pieces differ from each other."""
    block = os.urandom(1 << 20)
    with file.open("wb") as out:
        for number in range(size >> 20):
            out.write(number.to_bytes(8, "little") + block[8:])
        out.write(block[: size % (1 << 20)])
    return file


def wait_for_resources(trainer: Process, before: dict[str, int]) -> None:
    """Return once the trainer has no more threads, files and sockets than before."""
    wait_until(
        lambda: all(count <= before[kind] for kind, count in trainer.ask(count=True).items()),
        lambda: (trainer.ask(count=True), before),
    )


def announce(policy: Policy, trainer: Process) -> str:
    """The announcement of a policy that the trainer also sends."""
    policy = Policy.FromString(policy.SerializeToString())
    policy.direct.host, policy.direct.port = "127.0.0.1", trainer.hello["port"]
    return policy.SerializeToString().hex()


def offer(policy: Policy, to: Path) -> dict[str, str]:
    """The files of all parts of a policy, moved to where only the trainer finds them."""
    files = {}
    for part in policy.parts or [PolicyPart(uri=policy.uri, files=policy.files)]:
        for file in part.files:
            target = to / file.digest.rpartition(":")[2]
            source = Path(part.uri) / file.name
            if source.exists():
                source.rename(target)
            files[file.digest] = str(target)
    return files


def occupy(trainer: Process, source: Path, name: str = "w") -> None:
    """Take a place of a trainer for as long as its patience lasts: nobody joins the transfer that is asked for here."""
    from torch.distributed import TCPStore

    from forage_weights.direct import REQUESTS, TransferRequest, name_answer

    store = TCPStore("127.0.0.1", trainer.hello["port"], None, False, timedelta(seconds=SOON_S), wait_for_workers=False)
    request = TransferRequest(uuid.uuid4().hex, ((name, source.stat().st_size),))
    store.queue_push(REQUESTS, request.encode())
    assert store.get(name_answer(request.uid))
