"""Two runs share a Ray cluster that neither of them started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

LOOPBACK = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # despite its name
SERVICE = """
import concurrent.futures, os, sys, time
from forage_runtime.settings import ReplicaSettings, load_settings
from forage_runtime.telemetry.logs import configure_logs
from forage_rollout.deployments import cluster as module
from forage_rollout.deployments.cluster import JoinedCluster, open_cluster

class Scripted(JoinedCluster):
    def deploy(self):
        from ray import serve
        from serve_parts import build_application
        from forage_rollout.deployments.cluster import get_application_name
        bound = build_application(self._settings, ReplicaSettings())
        serve.run(bound, name=get_application_name(self._settings), route_prefix=None)

def watch():
    while not (failure := cluster.find_failure()):
        time.sleep(0.2)
    return failure

configure_logs("rollout")  # to stderr
settings = load_settings(overrides=sys.argv[1:])
cluster = open_cluster(settings)
assert isinstance(cluster, JoinedCluster)
cluster = cluster if settings.rollout.use_existing_app else Scripted(settings)
cluster.start()
for line in sys.stdin:
    if line == "run\\n":
        answers = cluster.get_handle("Dispatcher").many.remote(["g"] * 3, 1).result(timeout_s=280)
        print("answers", len(answers), flush=True)
    elif line == "watch\\n":
        # As the main process does, whose limit is longer.
        module.LOST_AFTER_S = 3.0
        found = concurrent.futures.ThreadPoolExecutor().submit(watch)
        try:
            print("failure:", found.result(timeout=15), flush=True)
        except TimeoutError:
            print("failure: Ray has not answered", flush=True)
        os._exit(1)
cluster.stop(10.0)
print("stopped", flush=True)
"""


@pytest.fixture
def head(free_address: Callable[[], str], tmp_path: Path) -> Iterator[str]:
    """A Ray cluster of one node on loopback."""
    address = free_address()
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    ray += ["--node-ip-address=127.0.0.1", f"--port={address.rpartition(':')[2]}", "--num-cpus=2"]
    # Ray's own range of ports for workers begins at 10002, and may hold the head's.
    ray += ["--min-worker-port=61000", "--max-worker-port=61999"]
    ray += ["--include-dashboard=false", f"--object-store-memory={80 * 2**20}"]
    folder = tempfile.mkdtemp(prefix="forage-")  # sockets live in there, and their paths must stay below 108 bytes
    environment = os.environ | LOOPBACK | {"RAY_TMPDIR": folder, "PYTHONPATH": os.pathsep.join(sys.path)}
    with (tmp_path / "ray.log").open("wb") as log:
        process = subprocess.Popen(ray, env=environment, stdout=log, stderr=log)
    log_file = tmp_path / "ray.log"
    wait_until(
        lambda: process.poll() is not None or b"Ray runtime started" in log_file.read_bytes(), log_file.read_text, 280.0
    )
    assert process.poll() is None, log_file.read_text()
    yield address
    for member in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        member.kill()
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


class Run:
    """One run's service in a process of its own."""

    def __init__(self, name: str, address: str, log: Path, *overrides: str) -> None:
        command = [sys.executable, "-c", SERVICE, f"run.id={name}", f"rollout.ray_address={address}", *overrides]
        environment = os.environ | LOOPBACK | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def answers(self) -> str:
        self.tell("run")
        return self.read()

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def stop(self) -> str:
        return self._process.communicate(timeout=280)[0]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def run(head: str, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def start(name: str, *overrides: str) -> Run:
        made.append(Run(name, head, tmp_path / f"{name}.log", *overrides))
        return made[-1]

    yield start
    for service in made:
        service.end()


def test_runs_share_a_cluster_and_remove_only_their_applications(run: Callable[..., Run], tmp_path: Path) -> None:
    one = run("one")
    assert one.answers() == "answers 3\n", (tmp_path / "one.log").read_text()
    two = run("two")
    assert two.answers() == "answers 3\n", (tmp_path / "two.log").read_text()
    front = run("two", "rollout.use_existing_app=true")
    assert front.answers() == "answers 3\n", (tmp_path / "two.log").read_text()
    assert front.stop() == "stopped\n"
    assert one.stop() == "stopped\n"
    assert two.answers() == "answers 3\n", "the end of another run, or of a front, is none of its business"
    assert two.stop() == "stopped\n"
    again = run("one")
    assert again.answers() == "answers 3\n", "the cluster is still there"
    assert again.stop() == "stopped\n"


def test_a_cluster_that_dies_is_noticed(run: Callable[..., Run], tmp_path: Path) -> None:
    one = run("one")
    assert one.answers() == "answers 3\n", (tmp_path / "one.log").read_text()
    one.tell("watch")
    for process in psutil.Process().children(recursive=True):
        if process.name() == "gcs_server":
            process.kill()
    found = one.read()
    assert found.startswith(("failure: no Ray at ", "failure: Ray has not answered")), (
        tmp_path / "one.log"
    ).read_text()
