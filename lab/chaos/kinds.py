"""The kinds of fault: what is struck, how, for how long, and when that part works again."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import redis

from chaos.arithmetic import draw_pause_s
from chaos.disks import SmallDisk, cut_end, flip_bit
from chaos.probes import Asker, Probe, all_of
from chaos.stack import Stack
from forage_queue.streams.history import FOLDER, History

KILLED = (
    "redis",
    "reward",
    "reward-worker",
    "retriever",
    "rollout",
    "dispatcher",
    "agent",
    "replica",
    "engine-core",
    "raylet",
    "gcs",
    "trainer",
    "rank",
)
"""Roles that are killed, and stopped for a while."""
DAMAGED_COPY = "damaged-copy"
"""A policy on the engines' machine that it was fetched to."""
FILES = ("torn-redis-log", "damaged-checkpoint", "damaged-policy", DAMAGED_COPY, "damaged-index")
SHORTAGES = ("full-disk-checkpoints", "full-disk-redis", "redis-maxmemory")
SUPERVISOR = "kill-supervisor"
TWO = "kill-two"
PUBLISHING = ("kill-publishing", "stop-publishing")
"""The trainer, while it publishes a policy and engines fetch it."""
STORE_KINDS = ("lose-store", "stop-store")
"""Kinds that need policies in an object store, which is down for a while, and has lost all of them then, or stands."""
KINDS = (
    *(f"{how}-{role}" for how in ("kill", "stop") for role in KILLED),
    SUPERVISOR,
    TWO,
    *PUBLISHING,
    *FILES,
    *SHORTAGES,
    *STORE_KINDS,
)
RANK_KINDS = ("kill-rank", "stop-rank")
"""Kinds that need a trainer of two processes."""
_STOP_S = (1.0, 60.0)
_SHORTAGE_S = (2.0, 20.0)
_BELOW_USED = 0.9
COPIES = "policy-cache"
"""Folder, beside the run's, of policies that engines have fetched."""
_PUBLISH_S = 5.0
"""Longest wait for the trainer to begin to publish."""
_INTO_PUBLISHING_S = 0.3


class NothingToStrikeError(Exception):
    """What a kind strikes is not there now."""


@dataclass
class Strike:
    """A fault under way.

    Attributes:
        began: when it struck.
        until: when it is over: `began`, unless it lasts.
        is_back: whether the part that was struck works again.
        lift: ends a fault that lasts; raises OSError or RedisError where that must be tried again.
        batch: that of the first group which was finished after `began`.
        back_s, recovery_s: from `until` until the part works again, and until `batch` was trained on, too; None before.
        hung: whether it was given up.
        ended: the last words of the run, if it ended itself and was resumed.
        overlaps: whether another fault struck before the recovery.
        transport: how the policies of the run reach the engines.
    """

    kind: str
    detail: str
    began: float
    is_back: Callable[[], bool]
    until: float = 0.0
    lift: Callable[[], object] | None = None
    back_s: float | None = None
    recovery_s: float | None = None
    batch: int | None = None
    hung: bool = False
    ended: str = ""
    overlaps: bool = False
    transport: str = ""

    def __post_init__(self) -> None:
        self.until = max(self.until, self.began)


@dataclass
class Arsenal:
    """Strikes the stack with any kind of fault."""

    stack: Stack
    generator: random.Random
    disks: dict[str, SmallDisk] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.asker = Asker(self.stack)
        self._copies = self.stack.folder / COPIES

    def strike(self, kind: str) -> Strike:
        """
        Raises:
            NothingToStrikeError: the process or the file is not there now.
        """
        how, _, role = kind.partition("-")
        if kind == SUPERVISOR:
            return self._kill(kind, ["supervisor"])
        if kind == TWO:
            present = [role for role in KILLED if self.stack.find(role)]
            return self._kill(kind, self.generator.sample(present, 2) if len(present) > 1 else [])
        if kind in PUBLISHING:
            self._await_publishing()
            return self._kill(kind, ["trainer"]) if how == "kill" else self._stop(kind, "trainer")
        if kind == "lose-store":
            return self._lose_store(kind)
        if how in ("kill", "stop"):
            return self._kill(kind, [role]) if how == "kill" else self._stop(kind, role)
        strikes: dict[str, Callable[[str], Strike]] = {
            "torn-redis-log": self._tear_log,
            "damaged-checkpoint": self._damage_checkpoint,
            "damaged-policy": self._damage_policy,
            DAMAGED_COPY: self._damage_copy,
            "damaged-index": self._damage_index,
            "full-disk-checkpoints": self._fill_disk,
            "full-disk-redis": self._fill_disk,
            "redis-maxmemory": self._limit_memory,
        }
        return strikes[kind](kind)

    def find_problem(self, kind: str) -> str:
        """Why a kind cannot be tried on this machine; empty where it can."""
        if kind.startswith("full-disk-"):
            return self.disks[kind.removeprefix("full-disk-")].problem
        if kind in STORE_KINDS and self.stack.store is None:
            return "the policies are in no object store"
        if kind == DAMAGED_COPY and not self._copies.is_dir():
            return "the engines read the published files in place"
        return ""

    def _choose(self, role: str) -> psutil.Process:
        present = self.stack.find(role)
        if not present:
            raise NothingToStrikeError(f"there is no {role} now")
        return self.generator.choice(present)

    def _kill(self, kind: str, roles: Sequence[str], then: Callable[[], str] = lambda: "") -> Strike:
        if not roles:
            raise NothingToStrikeError("nothing runs")
        victims = {role: self._choose(role) for role in roles}
        probes = [Probe(self.stack, self.asker, role, {victim.pid}) for role, victim in victims.items()]
        began = time.time()
        for victim in victims.values():
            try:
                victim.kill()
            except psutil.NoSuchProcess:
                raise NothingToStrikeError(f"process {victim.pid} has ended") from None
        for probe in probes:
            probe.since = time.time()
        try:
            detail = then() or " and ".join(roles)
        except (NothingToStrikeError, OSError) as error:  # what was to be damaged has been replaced meanwhile
            detail = f"only killed: {error}"
        return Strike(kind, detail, began, all_of(probes))

    def _stop(self, kind: str, role: str) -> Strike:
        victim = self._choose(role)
        probe = Probe(self.stack, self.asker, role)
        seconds = draw_pause_s(self.generator, *_STOP_S)

        def go_on() -> None:
            try:
                victim.send_signal(signal.SIGCONT)
            except psutil.Error:
                return

        try:
            victim.send_signal(signal.SIGSTOP)
        except psutil.NoSuchProcess:
            raise NothingToStrikeError(f"process {victim.pid} has ended") from None
        return _make_lasting(kind, f"for {seconds:.1f} s", seconds, probe, go_on)

    def _await_publishing(self) -> None:
        """Return at a random moment after a folder of a policy was begun."""
        policies = self.stack.run / "policies"
        deadline = time.time() + _PUBLISH_S  # lint: short because another moment will do
        before = set(_list_names(policies))
        while set(_list_names(policies)) <= before:
            if time.time() > deadline:
                raise NothingToStrikeError("no policy is published now")
            time.sleep(0.002)
        time.sleep(self.generator.uniform(0, _INTO_PUBLISHING_S))

    def _lose_store(self, kind: str) -> Strike:
        store = self.stack.store
        assert store is not None
        probe = Probe(self.stack, self.asker, "store", {victim.pid for victim in self.stack.find("store")})
        seconds = draw_pause_s(self.generator, *_SHORTAGE_S)

        def start_again() -> None:
            if not self.stack.find("store"):
                store.start()
            if not store.create_bucket():
                raise ConnectionError("the store has not started yet")

        store.kill()
        return _make_lasting(kind, f"down for {seconds:.1f} s, and empty then", seconds, probe, start_again)

    def _tear_log(self, kind: str) -> Strike:
        def tear() -> str:
            run = self.stack.run
            files = list((run / "redis/appendonlydir").glob("*.incr.aof"))
            if not files:
                raise NothingToStrikeError("there is no log yet")
            file = max(files, key=lambda path: path.stat().st_mtime)
            with History(run / FOLDER, run.name, "chaos").record("lose_data", {}):  # for the checker of the history
                return f"{cut_end(file, self.generator.randint(1, 40))} bytes of {file.name}"

        return self._kill(kind, ["redis"], tear)

    def _damage_checkpoint(self, kind: str) -> Strike:
        def damage() -> str:
            newest = self._find_newest("checkpoints", "step_*")
            return self._damage([file for file in (newest / "state").rglob("*") if file.is_file()])

        self._find_newest("checkpoints", "step_*")
        return self._kill(kind, ["trainer"], damage)

    def _damage_policy(self, kind: str) -> Strike:
        def damage() -> str:
            newest = self._find_newest("policies", "v*")
            return self._damage([*newest.glob("*.safetensors"), *newest.glob("*.delta")])

        self._find_newest("policies", "v*")
        return self._kill(kind, ["replica"], damage)

    def _damage_copy(self, kind: str) -> Strike:
        def damage() -> str:
            copies = [folder for folder in self._copies.iterdir() if folder.is_dir() and folder.name[0] != "."]
            newest = max(copies, key=lambda folder: folder.stat().st_mtime, default=self._copies)
            return self._damage(list(newest.glob("*.safetensors")))

        return self._kill(kind, ["replica"], damage)

    def _damage_index(self, kind: str) -> Strike:
        cache = self.stack.folder / "retriever-cache"

        def damage() -> str:
            return self._damage([f for f in cache.glob("*/**/*") if f.is_file() and "encoder-" not in str(f)])

        if not cache.is_dir():
            raise NothingToStrikeError("there is no index yet")
        return self._kill(kind, ["retriever"], damage)

    def _damage(self, files: Sequence[Path]) -> str:
        """Flip a bit somewhere in the files; large ones are hit more often."""
        sizes = [file.stat().st_size for file in files]
        if not sum(sizes):
            raise NothingToStrikeError("there are no files")
        (file,) = self.generator.choices(files, sizes)
        position, bit = self.generator.randrange(file.stat().st_size), self.generator.randrange(8)
        flip_bit(file, position, bit)
        return f"bit {bit} of byte {position} of {file.parent.name}/{file.name}"

    def _find_newest(self, folder: str, pattern: str) -> Path:
        found = [path for path in (self.stack.run / folder).glob(pattern) if path.is_dir()]
        if not found:
            raise NothingToStrikeError(f"there is nothing in {folder} yet")
        return max(found, key=lambda path: path.stat().st_mtime)

    def _fill_disk(self, kind: str) -> Strike:
        place = kind.removeprefix("full-disk-")
        role = "redis" if place == "redis" else "trainer"
        probe = Probe(self.stack, self.asker, role)
        seconds = draw_pause_s(self.generator, *_SHORTAGE_S)
        self.disks[place].fill()
        return _make_lasting(kind, f"for {seconds:.1f} s", seconds, probe, self.disks[place].empty)

    def _limit_memory(self, kind: str) -> Strike:
        server = self.stack.redis
        probe = Probe(self.stack, self.asker, "redis")
        seconds = draw_pause_s(self.generator, *_SHORTAGE_S)
        try:
            limit = int(server.info("memory")["used_memory"] * _BELOW_USED)
            server.config_set("maxmemory", limit)
        except redis.RedisError as error:
            raise NothingToStrikeError(f"Redis: {error}") from None
        detail = f"{limit / 2**20:.1f} MiB for {seconds:.1f} s"
        return _make_lasting(kind, detail, seconds, probe, lambda: server.config_set("maxmemory", 0))


def _list_names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def _make_lasting(kind: str, detail: str, seconds: float, probe: Probe, lift: Callable[[], object]) -> Strike:
    began = time.time()
    probe.since = began + seconds
    return Strike(kind, detail, began, probe, began + seconds, lift)
