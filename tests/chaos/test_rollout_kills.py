"""Engine, dispatcher and Redis are killed -9 under load, an engine is frozen: every group comes out exactly once."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from rollout_parts import ADDRESSES, Services, get, prompt, publish, small_corpus, take, until, waits_for

from forage_common.settings import RedisSettings
from forage_common.streams import StreamClient
from forage_common.v1.trajectory_pb2 import Status, TrajectoryGroup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
GROUPS = 24
ENGINES = 2


@pytest.fixture
def services(repository: Path, tmp_path: Path) -> Iterator[Services]:
    made = Services(repository, tmp_path)
    yield made
    made.end()


class Load:
    """A trainer that issues batches of groups and takes them back."""

    def __init__(self, streams: StreamClient, health: str) -> None:
        self._streams = streams
        self._health = health
        self.batch = 0
        self.taken: list[TrajectoryGroup] = []

    def issue(self) -> None:
        self.batch += 1
        for position in range(GROUPS):
            self._streams.issue(prompt(position, self.batch, 0))

    def take(self, count: int) -> None:
        found = take(self._streams, count)
        assert len(found) >= count, f"{len(found)} of {count} groups came out"
        self.taken += found

    def strike(self, kill: Callable[[], None]) -> dict[str, float]:
        """Kill something in the middle of a batch; seconds until groups flow again, and until all replicas run."""
        self.issue()
        self.take(GROUPS // 4)
        kill()
        begin = time.monotonic()
        self.take(1)
        flows = time.monotonic() - begin
        self.take(len(self.expected) - len(self.taken))
        until(self.whole)
        return {"groups_again_s": round(flows, 1), "whole_again_s": round(time.monotonic() - begin, 1)}

    @property
    def expected(self) -> list[tuple[int, int]]:
        return [(batch, position) for batch in range(1, self.batch + 1) for position in range(GROUPS)]

    def whole(self) -> bool:
        found = re.search(r'forage_rollout_replicas\{deployment="Engine"\} (\d+)', get(self._health, "/metrics")[1])
        return waits_for(self._health) == set() and found is not None and int(found[1]) == ENGINES


def replicas(service: int, deployment: str) -> list[psutil.Process]:
    """The worker processes of a deployment; Ray writes its name into their titles."""
    family = psutil.Process(service).children(recursive=True)
    return [process for process in family if re.match(rf"ray::ServeReplica:[^:]*:{deployment}\b", title(process))]


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def ended(processes: list[psutil.Process], timeout_s: float) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def test_every_group_comes_out_exactly_once_whatever_dies(
    services: Services,
    free_address: Callable[[], str],
    redis_server: RedisSettings,
    repository: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, corpus = repository / "models/tiny-policy", tmp_path / "corpus.jsonl"
    small_corpus(corpus)
    addresses = {f"{name}_address": free_address() for name in ADDRESSES}
    common = [f"{name}={address}" for name, address in addresses.items()]
    common += [f"redis.url={redis_server.url}", "redis.reclaim_idle_s=3", "run.id=e2e", f"run.dir={tmp_path}/runs"]
    common += [f"model.path={model}", f"data.corpus={corpus}", "retriever.mode=bm25", "rollout.n=4"]
    common += [f"rollout.engine_replicas.min={ENGINES}", f"rollout.engine_replicas.max={ENGINES}"]
    common += ["rollout.engine.hang_timeout_s=10", "rollout.max_groups_in_flight=12"]
    services.start("reward", *common)
    services.start("retriever", *common, f"retriever.cache_dir={tmp_path}/cache")
    service = services.start("rollout", *common).pid
    streams = StreamClient(redis_server, "e2e")
    streams.create()
    publish(streams, model, tmp_path, 0, 1)
    load = Load(streams, addresses["rollout.health_address"])
    until(load.whole)
    assert len(streams.replicas()) == ENGINES

    def kill_engine() -> None:
        """The replica alone: what it leaves behind must go, too."""
        victim = replicas(service, "Engine")[0]
        left = victim.children(recursive=True)
        assert left, "the engine has a process of its own"
        victim.kill()
        assert ended([victim, *left], 20), "the engine's core outlived its replica"

    def kill_core() -> None:
        replicas(service, "Engine")[0].children(recursive=True)[0].kill()

    def freeze_core() -> None:
        replicas(service, "Engine")[0].children(recursive=True)[0].send_signal(signal.SIGSTOP)

    def kill_dispatcher() -> None:
        (victim,) = replicas(service, "Dispatcher")
        victim.kill()

    restarted: list[subprocess.Popen[bytes]] = []

    def kill_redis() -> None:
        port = int(redis_server.url.rpartition(":")[2].partition("/")[0])
        (pid,) = {c.pid for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == "LISTEN"}
        victim = psutil.Process(pid)
        command = victim.cmdline()
        victim.kill()
        time.sleep(2.0)
        restarted.append(subprocess.Popen(command))

    try:
        for name, kill in (
            ("an engine replica", kill_engine),
            ("an engine's core", kill_core),
            ("an engine's core (frozen)", freeze_core),
            ("the dispatcher", kill_dispatcher),
            ("Redis, for 2 s", kill_redis),
        ):
            times = load.strike(kill)
            with capsys.disabled():
                sys.stdout.write(f"\nkilled {name}: {json.dumps(times)}\n")
        assert take(streams, 1, 5.0) == [], "a group came out a second time"
        assert sorted((group.batch, group.position) for group in load.taken) == load.expected
        assert streams.backlog(streams.prompts) == 0
        for trajectory in (t for group in load.taken for t in group.trajectories):
            assert trajectory.status == Status.STATUS_OK, trajectory.status_detail
    finally:
        for server in restarted:
            server.kill()
            server.wait()
