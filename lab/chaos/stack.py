"""A `forage demo` as its user runs it, and what can be seen of it from outside: processes, health, steps, streams."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import redis
from s3_server import S3Server

from forage_proto.v1.packed_pb2 import PackedGroup

FORAGE = [sys.executable, "-c", "from forage_cli.main import main; main()"]
PORTS = {"redis": 0, "retriever": 10, "reward": 21, "rollout": 31, "trainer": 41}
"""Program → where it tells its health (Redis: where it listens), from the base port."""
ROLLOUT_GRPC = 30
MAIN_ROLES = ("redis", "reward", "retriever", "rollout", "trainer")
_TITLES = {
    "dispatcher": ("rollout", re.compile(r"ray::ServeReplica:[^:]*:Dispatcher\b")),
    "agent": ("rollout", re.compile(r"ray::ServeReplica:[^:]*:Agent\b")),
    "replica": ("rollout", re.compile(r"ray::ServeReplica:[^:]*:Engine\b")),
    "engine-core": ("rollout", re.compile(r"VLLM::EngineCore")),
    "raylet": ("rollout", re.compile(r"/raylet/raylet ")),
    "gcs": ("rollout", re.compile(r"/gcs/gcs_server ")),
    "reward-worker": ("reward", re.compile(r"forage_reward")),
    "rank": ("trainer", re.compile(r"ray::.*Rank\b")),
}
"""Role of a process → the program that started it, and what its title matches."""
ROLES = (*MAIN_ROLES, *_TITLES)
_PROBE_S = 1.0


class Steps:
    """The steps that the trainer has reported, read from the end of its file of metrics."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._state = (0, 0)  # inode, bytes read
        self._seen: set[tuple[int, float]] = set()
        self.times: dict[int, float] = {}
        """Step → when it was last reported."""
        self.last = 0
        self.redone = 0
        """Steps that were reported again."""

    def poll(self) -> None:
        try:
            inode = self._file.stat().st_ino
            with self._file.open("rb") as lines:
                read = self._state[1] if inode == self._state[0] else 0
                lines.seek(read)
                content = lines.read()
        except FileNotFoundError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._state = (inode, read + len(whole))
        for line in whole.splitlines():
            row = json.loads(line)
            step, reported = int(row["step"]), float(row["time"])
            if (step, reported) not in self._seen:
                self._seen.add((step, reported))
                self.redone += step <= self.last
                self.last = max(self.last, step)
                self.times[step] = reported


class _Administrator(redis.CredentialProvider):
    """The administrator of the run's server, whose password the run makes when it starts."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def get_credentials(self) -> tuple[str, str]:
        return "forage-admin", self._file.read_text().strip() if self._file.exists() else "not made yet"


@dataclass
class Stack:
    """One run: its command, restarted with `--resume`, and its folder.

    store: the object store of its policies, if they are in one; it is no child of the run.
    """

    repository: Path
    folder: Path
    base_port: int
    settings: list[str]
    run_id: str
    store: S3Server | None = None
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    steps: Steps = field(init=False)

    def __post_init__(self) -> None:
        self.run.mkdir(parents=True, exist_ok=True)
        self.steps = Steps(self.run / "metrics.jsonl")
        self.redis = redis.Redis(
            port=self.base_port,
            credential_provider=_Administrator(self.run / "redis/passwords/forage-admin"),
            socket_timeout=_PROBE_S,
            socket_connect_timeout=_PROBE_S,
            retry=None,
        )

    @property
    def run(self) -> Path:
        return self.folder / "runs" / self.run_id

    def key(self, name: str) -> str:
        return f"forage:{{{self.run_id}}}:{name}"

    def start(self, *more: str) -> None:
        """Start the run, or resume it if it has begun."""
        how = ["--resume"] if self.starts else ["--base-port", str(self.base_port), f"run.id={self.run_id}"]
        command = [*FORAGE, "demo", "--no-console", *how, f"run.dir={self.folder / 'runs'}", *self.settings, *more]
        self.starts += 1
        environment = os.environ | (self.store.environment if self.store else {})
        with (self.folder / "demo.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.repository,
                env=environment,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait for the end of a command that was killed."""
        if self.process is not None:
            self.process.wait()

    @property
    def ended(self) -> int | None:
        """The exit code of the command; None while it runs."""
        return None if self.process is None else self.process.poll()

    def read_last_words(self) -> str:
        lines = (self.folder / "demo.log").read_text(errors="replace").splitlines()
        return " ".join([line.strip() for line in lines if line.strip()][-3:])[-300:]

    def find(self, role: str) -> list[psutil.Process]:
        """The live processes of a role."""
        if self.process is None or self.process.poll() is not None:
            return []
        if role == "store":
            process = self.store.process if self.store else None
            return [] if process is None or process.poll() is not None else [psutil.Process(process.pid)]
        if role == "supervisor":
            return [psutil.Process(self.process.pid)]
        program, title = _TITLES.get(role, (role, None))
        try:
            children = psutil.Process(self.process.pid).children()
            mains = [child for child in children if _read_token(child).startswith(f"{program}-")]
            if title is None:
                return [main for main in mains if _is_alive(main)]
            family = [process for main in mains for process in main.children(recursive=True)]
        except psutil.Error:
            return []
        return [process for process in family if _is_alive(process) and title.search(_read_title(process))]

    def is_ready(self, program: str) -> bool:
        """Whether a program says that it is ready."""
        return self.read_health(program)[0] == 200

    def read_health(self, program: str) -> tuple[int, str]:
        """Status and text of a program's readiness; status 0 without an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.base_port + PORTS[program], timeout=_PROBE_S)
        try:
            connection.request("GET", "/readyz")
            reply = connection.getresponse()
            return reply.status, reply.read().decode()
        except (OSError, http.client.HTTPException):
            return 0, ""
        finally:
            connection.close()

    def answers_redis(self) -> bool:
        try:
            return bool(self.redis.ping())
        except redis.RedisError:
            return False

    def read_consumers(self) -> dict[str, float]:
        """Dispatcher → when it last called for prompts."""
        try:
            rows: Any = self.redis.xinfo_consumers(self.key("prompts"), "forage")
        except redis.RedisError:
            return {}
        now = time.time()
        return {row["name"].decode(): now - row["idle"] / 1000 for row in rows}

    def find_batch_after(self, moment: float) -> int | None:
        """The batch of the first group that was finished after a moment; None before there is one."""
        try:
            rows: Any = self.redis.xrange(self.key("trajectories"), min=f"({int(moment * 1000)}-0", count=1)
        except redis.RedisError:
            return None
        return int(PackedGroup.FromString(rows[0][1][b"p"]).head.batch) if rows else None

    def list_leftovers(self) -> list[str]:
        """The command lines of processes of this run that still live."""
        titles = (_read_title(process) for process in psutil.process_iter())
        return [title for title in titles if f"{self.run}/" in title or f"-{self.run_id}:" in title]

    def interrupt(self, timeout_s: float = 90.0) -> None:
        """Press Ctrl-C and wait; a supervisor that does not end is killed, and so is what it leaves."""
        if self.process is None or self.process.poll() is not None:
            return
        family = psutil.Process(self.process.pid).children(recursive=True)
        for process in family:
            _continue(process)
        os.kill(self.process.pid, signal.SIGINT)
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for process in family:
            if _is_alive(process):
                process.kill()


STORE = 49
"""Where the object store listens, from the base port."""


def _read_token(process: psutil.Process) -> str:
    try:
        return str(process.environ().get("FORAGE_RUN_TOKEN", ""))
    except (psutil.Error, OSError):
        return ""


def _read_title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) + " "
    except (psutil.Error, OSError):
        return ""


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _continue(process: psutil.Process) -> None:
    try:
        process.send_signal(signal.SIGCONT)
    except psutil.Error:
        return
