"""Engine, dispatcher and Redis are killed -9 under load, an engine is frozen: every group is written exactly once.

An engine that dies has 200 trajectories or more in flight on the service: no group of theirs starts again.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rollout_parts import (
    ADDRESSES,
    Services,
    build_prompt,
    get,
    is_running,
    list_waiting,
    publish,
    take,
    wait_until,
    write_small_corpus,
)

from forage_proto.v1.trajectory_pb2 import Status, TrajectoryGroup
from forage_queue.streams.client import StreamClient
from forage_runtime.settings import RedisSettings

GROUPS, SAMPLES = 32, 8
IN_FLIGHT = 200
"""Trajectories at least, when an engine is killed."""
ENGINES = 2


@pytest.fixture
def services(repository: Path, tmp_path: Path) -> Iterator[Services]:
    services = Services(repository, tmp_path)
    yield services
    services.end()


class Load:
    """A trainer that issues batches of groups and takes them back."""

    def __init__(self, streams: StreamClient) -> None:
        self._streams = streams
        self.batch = 0
        self.taken: list[TrajectoryGroup] = []

    def issue(self) -> None:
        self.batch += 1
        for position in range(GROUPS):
            self._streams.issue(build_prompt(position, self.batch, 0, samples=SAMPLES))

    def take(self, count: int) -> None:
        groups = take(self._streams, count)
        assert len(groups) >= count, f"{len(groups)} of {count} groups came out"
        self.taken += groups

    def strike(self, kill: Callable[[], psutil.Process], is_complete: Callable[[], bool]) -> dict[str, float]:
        """Kill something in the middle of a batch.

        Args:
            kill: waits for its moment; returns the process that must go.
            is_complete: whether everything runs.

        Returns:
            Seconds until another group comes out, and until the process is gone and everything runs.
        """
        self.issue()
        victim = kill()
        begin = time.monotonic()
        self.taken += take(self._streams, GROUPS, 0.01)  # those that were there before
        self.take(1)
        flows = time.monotonic() - begin
        wait_until(lambda: not is_running(victim) and is_complete())
        again = time.monotonic() - begin
        self.take(len(self.expected) - len(self.taken))
        return {"next_group_s": round(flows, 1), "whole_again_s": round(again, 1)}

    @property
    def expected(self) -> list[tuple[int, int]]:
        return [(batch, position) for batch in range(1, self.batch + 1) for position in range(GROUPS)]


def list_replicas(service: int, deployment: str) -> list[psutil.Process]:
    """The worker processes of a deployment; Ray writes its name into their titles."""
    family = psutil.Process(service).children(recursive=True)
    return [process for process in family if re.match(rf"ray::ServeReplica:[^:]*:{deployment}\b", read_title(process))]


def list_cores(engine: psutil.Process) -> list[psutil.Process]:
    """vLLM's process of an engine replica; none while the replica begins to start."""
    try:
        return [child for child in engine.children(recursive=True) if "EngineCore" in read_title(child)]
    except psutil.NoSuchProcess:
        return []


def read_title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def read_metric(health: str, name: str) -> float:
    """The sum of a metric's samples, which the service renews about once a second; 0 before there is a page."""
    status, text = get(health, "/metrics")
    families = text_string_to_metric_families(text) if status == 200 else ()
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def test_every_group_is_written_exactly_once_after_every_kill(
    services: Services,
    free_address: Callable[[], str],
    redis_server: RedisSettings,
    repository: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, corpus = repository / "models/tiny-policy", tmp_path / "corpus.jsonl"
    write_small_corpus(corpus)
    addresses = {f"{name}_address": free_address() for name in ADDRESSES}
    common = [f"{name}={address}" for name, address in addresses.items()]
    common += [f"redis.url={redis_server.url}", "redis.reclaim_idle_s=3", "run.id=e2e", f"run.dir={tmp_path}/runs"]
    common += [f"model.path={model}", f"data.corpus={corpus}", "retriever.mode=bm25", f"rollout.n={SAMPLES}"]
    common += [f"rollout.engine_replicas.min={ENGINES}", f"rollout.engine_replicas.max={ENGINES}"]
    # Each engine has room for all that is in flight, so that the dispatcher claims it without a wait.
    common += ["rollout.engine.hang_timeout_s=20", "rollout.engine.max_num_seqs=128"]
    common += ["rollout.max_dispatchers=1", "rollout.trajectory_timeout_s=300"]
    health = addresses["rollout.health_address"]
    services.start("reward", *common)
    services.start("retriever", *common, f"retriever.cache_dir={tmp_path}/cache")
    service = services.start("rollout", *common).pid
    streams = StreamClient(redis_server, "e2e")
    streams.create_groups()
    publish(streams, model, tmp_path / "runs", 0, 1)
    load = Load(streams)

    known: set[str] = set()  # engines that were serving at the last kill of an engine
    awaited = ENGINES  # engines to appear besides those

    def is_complete() -> bool:
        engines, dispatchers = list_replicas(service, "Engine"), list_replicas(service, "Dispatcher")
        cores = [core for engine in engines for core in list_cores(engine)]
        if not len(engines) == len(cores) == ENGINES or len(dispatchers) != 1:
            return False
        serving = set(streams.read_replicas()) - known
        return len(serving) >= awaited and list_waiting(health) == set()

    def choose_engine() -> psutil.Process:
        nonlocal known, awaited
        wait_until(lambda: read_metric(health, "forage_rollout_samples_in_flight") >= IN_FLIGHT)
        known, awaited = set(streams.read_replicas()), 1
        return list_replicas(service, "Engine")[0]

    wait_until(is_complete)

    def kill_engine() -> psutil.Process:
        """Kill the replica alone; its child processes must end, too."""
        victim = choose_engine()
        left = victim.children(recursive=True)
        assert left, "the engine has a process of its own"
        victim.kill()
        wait_until(lambda: not any(map(is_running, left)))
        return victim

    def signal_core(signum: signal.Signals) -> psutil.Process:
        victim = choose_engine()
        (core,) = list_cores(victim)
        core.send_signal(signum)
        return victim

    def kill_dispatcher() -> psutil.Process:
        load.take(GROUPS // 4)
        (victim,) = list_replicas(service, "Dispatcher")
        victim.kill()
        return victim

    restarted: list[subprocess.Popen[bytes]] = []

    def kill_redis() -> psutil.Process:
        load.take(GROUPS // 4)
        port = int(redis_server.url.rpartition(":")[2].partition("/")[0])
        (pid,) = {c.pid for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == "LISTEN"}
        victim = psutil.Process(pid)
        command = [victim.exe(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", victim.cwd()]
        command += ["--appendonly", "yes", "--appendfsync", "always"]
        victim.kill()
        time.sleep(2.0)
        restarted.append(subprocess.Popen(command))
        return victim

    try:
        for name, kill, is_engine in (
            ("an engine replica", kill_engine, True),
            ("an engine's core", partial(signal_core, signal.SIGKILL), True),
            ("an engine's core (frozen)", partial(signal_core, signal.SIGSTOP), True),
            ("the dispatcher", kill_dispatcher, False),
            ("Redis, for 2 s", kill_redis, False),
        ):
            before = read_metric(health, "forage_rollout_generations_repeated_total")
            found = load.strike(kill, is_complete)
            if is_engine:
                lost = read_metric(health, "forage_rollout_generations_repeated_total") - before
                assert 0 < lost <= GROUPS * SAMPLES
                assert read_metric(health, "forage_rollout_runs_repeated_total") == 0, "a group started again"
                assert read_metric(health, "forage_rollout_groups_reclaimed_total") == 0
                found["generations_lost"] = lost
            with capsys.disabled():
                sys.stdout.write(f"\nkilled {name}: {json.dumps(found)}\n")
        assert take(streams, 1, 5.0) == [], "a group came out a second time"
        assert sorted((group.batch, group.position) for group in load.taken) == load.expected
        assert streams.count_backlog(streams.prompts) == 0
        for trajectory in (t for group in load.taken for t in group.trajectories):
            assert trajectory.status == Status.STATUS_OK, trajectory.status_detail
    finally:
        for server in restarted:
            server.kill()
            server.wait()
