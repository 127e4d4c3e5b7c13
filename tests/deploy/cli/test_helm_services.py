"""Containers of the chart as processes: with the command, environment and settings that it gives, probes succeed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from deployment_tools import REPOSITORY
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helm_chart import Object, containers, one, pods, rendered, settings_text, template

GRACE_S = 20.0


class Running:
    """One container of a Deployment: its ports and folders are others, everything else is as it stands."""

    def __init__(self, component: str, settings: Mapping[str, Any], folder: Path, free: Callable[[], str]) -> None:
        done = template({"settings": settings})
        assert done.returncode == 0, done.stderr
        objects = tuple(filter(None, yaml.load_all(done.stdout, yaml.CSafeLoader)))
        [(_, pod)] = pods(one(objects, "Deployment", component))
        [self.container] = [container for container, first in containers(pod["spec"]) if not first]
        self.ports = {port["name"]: free().rpartition(":")[2] for port in self.container["ports"]}
        file = folder / "settings.yaml"
        file.write_text(self._moved(settings_text(objects), folder))
        names = {"python": str(REPOSITORY / f".venvs/{component}/bin/python")}
        names["/etc/forage/settings/settings.yaml"] = str(file)
        environment = {entry["name"]: self._moved(entry["value"], folder) for entry in self.container["env"]}
        paths = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        self.process = subprocess.Popen(
            [names.get(word, word) for word in self.container["command"]],
            env={**paths, **environment},
            cwd=folder,
            stderr=(folder / "log").open("wb"),
        )

    def _moved(self, text: str, folder: Path) -> str:
        for port in self.container["ports"]:
            text = text.replace(f"0.0.0.0:{port['containerPort']}", f"127.0.0.1:{self.ports[port['name']]}")
        return text.replace("/data/", f"{folder}/data/").replace("/cache/", f"{folder}/cache/")

    def passes(self, probe: str) -> bool:
        """Whether a probe succeeds now."""
        asked: Object = self.container[probe]
        if "grpc" in asked:
            [name] = [
                port["name"] for port in self.container["ports"] if port["containerPort"] == asked["grpc"]["port"]
            ]
            with grpc.insecure_channel(f"127.0.0.1:{self.ports[name]}") as channel:
                try:
                    reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
                except grpc.RpcError:
                    return False
                return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
        get = asked["httpGet"]
        try:
            reply = httpx.get(f"http://127.0.0.1:{self.ports[get['port']]}{get['path']}", timeout=2)
        except httpx.TransportError:
            return False
        return bool(200 <= reply.status_code < 400)


@pytest.fixture
def start(tmp_path: Path, free_address: Callable[[], str]) -> Iterator[Callable[..., Running]]:
    made: list[Running] = []

    def begin(component: str, settings: Mapping[str, Any]) -> Running:
        made.append(Running(component, settings, tmp_path, free_address))
        return made[-1]

    yield begin
    for running in made:
        running.process.kill()
        running.process.wait()


@pytest.mark.parametrize("component", ["reward", "retriever"])
def test_a_container_passes_its_probes_and_ends_on_sigterm(
    component: str, start: Callable[..., Running], tmp_path: Path
) -> None:
    corpus = tmp_path / "data/world/corpus.jsonl"
    corpus.parent.mkdir(parents=True)
    corpus.write_text(json.dumps({"id": "1", "contents": '"Mongolia"\nThe capital is Ulaanbaatar.'}) + "\n")
    running = start(component, {"retriever": {"mode": "bm25"}})
    deadline = time.monotonic() + 200
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        while not running.passes(probe):
            assert running.process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (probe, (tmp_path / "log").read_text())
            time.sleep(0.1)
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(GRACE_S) == 0


@pytest.mark.parametrize(
    ("answer", "exit_code", "passes"),
    [
        ("<search> capital of Mongolia </search>\n<answer> Ulaanbaatar </answer>", 0, True),
        ("STATUS_TIMEOUT: the retriever gave no answer", 1, False),
    ],
)
def test_helm_test_fails_where_the_question_does(answer: str, exit_code: int, passes: bool, tmp_path: Path) -> None:
    """The command of the test's pod, with a `forage` that answers so."""
    [(_, pod)] = pods(one(rendered("defaults"), "Pod", "test"))
    [(container, _)] = containers(pod["spec"])
    command = tmp_path / "forage"
    command.write_text(f"#!/bin/sh\ncat <<'E'\n{answer}\nE\nexit {exit_code}\n")
    command.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as rollout:
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        environment |= {"HOST": "127.0.0.1", "PORT": str(rollout.getsockname()[1])}
        environment["PATH"] = f"{tmp_path}:{REPOSITORY / '.venvs/cli/bin'}:{os.environ['PATH']}"
        words = [*container["command"], *container["args"]]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=30)
    assert answer in done.stdout
    assert (done.returncode == 0) is passes
