"""Files: good ones of each reader, damaged, and read by a process with the code of a service."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import tempfile
from base64 import b64decode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import Message

from forage_proto.v1.trajectory_pb2 import Policy, TrajectoryGroup
from fuzz import targets
from fuzz.damage import damage, damage_json
from fuzz.inputs import Fault, Input, Verdict
from fuzz.messages import build_hostile
from fuzz.processes import MODULES, Process, find_python

_MESSAGES: dict[str, type[Message]] = {"policy": Policy, "group": TrajectoryGroup}
"""Names of files that hold one message."""


@dataclass(frozen=True)
class GoodFile:
    """A good file, and the reader that takes it."""

    call: str
    name: str
    content: bytes


@dataclass(frozen=True)
class FileSurface:
    """Readers of one program.

    Attributes:
        environment: the service in whose environment it runs.
        module: in `fuzz.programs`.
    """

    wire: str
    environment: str
    module: str

    @property
    def arguments(self) -> list[str]:
        return ["-m", "fuzz.programs.reader", self.module]

    def make(self, folder: Path) -> ReaderTarget:
        return ReaderTarget(Process(self.environment, self.arguments, folder, self.wire, pipe=True))

    def generate(self, seed: int) -> Iterator[Input]:
        """Damaged files without end, the same for the same seed."""
        good = self._read_good_files()
        by_call: dict[str, list[GoodFile]] = {}
        for one in good:
            by_call.setdefault(one.call, []).append(one)
        chance = random.Random(seed)
        while True:
            one = chance.choice(by_call[chance.choice(list(by_call))])
            yield Input(self.wire, one.call, (_damage_file(one, chance, good),), one.name)

    def _read_good_files(self) -> Sequence[GoodFile]:
        """Ask the program for good files of its readers."""
        command = [str(find_python(self.environment)), *self.arguments, "--good"]
        with tempfile.TemporaryDirectory(prefix="forage-fuzz-") as folder:
            environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": MODULES, "HOME": folder, "OMP_NUM_THREADS": "1"}
            environment["PYTHONHASHSEED"] = "0"
            lines = subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE).stdout
        rows = [json.loads(line) for line in lines.splitlines()]
        return [GoodFile(row["call"], row["name"], b64decode(row["content"])) for row in rows]


def _damage_file(one: GoodFile, chance: random.Random, good: Sequence[GoodFile]) -> bytes:
    if chance.random() < 0.02:
        return chance.choice((b"", b"\0" * 1000, chance.randbytes(500), chance.choice(good).content))
    if (kind := _MESSAGES.get(one.name)) is not None and chance.random() < 0.6:
        mixed = kind.FromString(one.content)
        mixed.MergeFrom(build_hostile(kind, chance, depth=3))
        return mixed.SerializeToString()
    suffix = one.name.rpartition(".")[2]
    if suffix in ("json", "jsonl") and chance.random() < 0.6:
        lines = one.content.splitlines() if suffix == "jsonl" else [one.content]
        place = chance.randrange(len(lines)) if lines else 0
        try:
            lines[place] = damage_json(json.loads(lines[place]), chance)
        except (ValueError, IndexError):
            return damage(one.content, chance)
        return b"\n".join(lines) + b"\n"
    return damage(one.content, chance, chance.choice((1, 1, 3, 20)))


class ReaderTarget:
    """A process that reads one file after the other and says what became of it, see `programs.reader`."""

    def __init__(self, process: Process) -> None:
        self.processes = [process]
        self._process = process
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        self._process.start()
        answer = await asyncio.to_thread(self._read_line)
        if answer.get("outcome") != "ready":
            raise RuntimeError(f"the reader does not start: {self._process.describe_end()}")

    async def send(self, one: Input) -> Verdict:
        async with self._lock:
            try:
                return await asyncio.wait_for(asyncio.to_thread(self._ask, one), targets.LIMIT_S)
            except TimeoutError:
                self._process.popen.kill()  # so that the thread ends; the caller starts it again
                await asyncio.to_thread(self._process.popen.wait)
                return Verdict("", Fault.HANG, f"{one.call} had not read {one.name} after {targets.LIMIT_S:g} s")

    async def check(self) -> str:
        return "" if self._process.is_alive else "the reader has ended"

    async def close(self) -> None:
        pass

    def _ask(self, one: Input) -> Verdict:
        stdin = self._process.popen.stdin
        assert stdin is not None
        head = {"call": one.call, "name": one.name, "size": len(one.parts[0])}
        try:
            stdin.write(json.dumps(head).encode() + b"\n" + one.parts[0])
            stdin.flush()
        except OSError:
            self._process.popen.wait()
            return Verdict("", Fault.CRASH, "the reader has ended")
        row = self._read_line()
        if not row:
            self._process.popen.wait()
            return Verdict("", Fault.CRASH, "the reader has ended")
        return Verdict(row["outcome"], Fault(row["fault"]) if row["fault"] else None, row["detail"])

    def _read_line(self) -> dict[str, str]:
        assert self._process.popen.stdout is not None
        line = self._process.popen.stdout.readline()
        row: dict[str, str] = json.loads(line) if line else {}
        return row
