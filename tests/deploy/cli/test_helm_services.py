"""Runs containers of the chart as processes, with their command, environment and settings: their probes succeed."""

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
from deployment_tools import REPOSITORY
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helm_chart import Object, find_object, list_containers, list_pods, read_settings, render, render_values

GRACE_S = 20.0


class ContainerProcess:
    """The process of a container of a Deployment; only its ports and folders differ."""

    def __init__(
        self, component: str, settings: Mapping[str, Any], folder: Path, free_address: Callable[[], str]
    ) -> None:
        objects = render_values({"settings": settings, "console": {"enabled": component == "console"}})
        [(_, pod)] = list_pods(find_object(objects, "Deployment", component))
        [self.container] = [container for container, is_init in list_containers(pod["spec"]) if not is_init]
        self.ports = {port["name"]: free_address().rpartition(":")[2] for port in self.container["ports"]}
        file = folder / "settings.yaml"
        file.write_text(self._relocate(read_settings(objects), folder))
        replacements = {"python": str(REPOSITORY / f".venvs/{component}/bin/python")}
        replacements["/etc/forage/settings/settings.yaml"] = str(file)
        given = {entry["name"]: entry["value"] for entry in self.container["env"] if "value" in entry}
        environment = {name: self._relocate(value, folder) for name, value in given.items()}
        paths = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        self.process = subprocess.Popen(
            [replacements.get(word, word) for word in self.container["command"]],
            env={**paths, **environment},
            cwd=folder,
            stderr=(folder / "log").open("wb"),
        )

    def _relocate(self, text: str, folder: Path) -> str:
        for port in self.container["ports"]:
            text = text.replace(f"0.0.0.0:{port['containerPort']}", f"127.0.0.1:{self.ports[port['name']]}")
        text = text.replace("/etc/forage/", f"{folder}/etc/forage/")
        return text.replace("/data/", f"{folder}/data/").replace("/cache/", f"{folder}/cache/")

    def passes(self, probe: str) -> bool:
        """Whether a probe succeeds now."""
        check: Object = self.container[probe]
        if "grpc" in check:
            [name] = [
                port["name"] for port in self.container["ports"] if port["containerPort"] == check["grpc"]["port"]
            ]
            with grpc.insecure_channel(f"127.0.0.1:{self.ports[name]}") as channel:
                try:
                    reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
                except grpc.RpcError:
                    return False
                return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
        get = check["httpGet"]
        try:
            reply = httpx.get(f"http://127.0.0.1:{self.ports[get['port']]}{get['path']}", timeout=2)
        except httpx.TransportError:
            return False
        return bool(200 <= reply.status_code < 400)


@pytest.fixture
def start(tmp_path: Path, free_address: Callable[[], str]) -> Iterator[Callable[..., ContainerProcess]]:
    processes: list[ContainerProcess] = []

    def start_component(component: str, settings: Mapping[str, Any]) -> ContainerProcess:
        processes.append(ContainerProcess(component, settings, tmp_path, free_address))
        return processes[-1]

    yield start_component
    for running in processes:
        running.process.kill()
        running.process.wait()


@pytest.mark.parametrize("component", ["reward", "retriever", "console"])
def test_a_container_passes_its_probes_and_exits_on_sigterm(
    component: str, start: Callable[..., ContainerProcess], tmp_path: Path
) -> None:
    corpus = tmp_path / "data/world/corpus.jsonl"
    corpus.parent.mkdir(parents=True)
    corpus.write_text(json.dumps({"id": "1", "contents": '"Mongolia"\nThe capital is Ulaanbaatar.'}) + "\n")
    token = tmp_path / "etc/forage/console-token/token"
    token.parent.mkdir(parents=True)
    token.write_text("secret")
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
        ("STATUS_TIMEOUT: the retriever did not reply", 1, False),
    ],
)
def test_helm_test_fails_if_the_question_fails(answer: str, exit_code: int, passes: bool, tmp_path: Path) -> None:
    """Runs the command of the test pod with a `forage` that prints this answer."""
    [(_, pod)] = list_pods(find_object(render("defaults"), "Pod", "test"))
    [(container, _)] = list_containers(pod["spec"])
    command = tmp_path / "forage"
    command.write_text(f"#!/bin/sh\ncat <<'E'\n{answer}\nE\nexit {exit_code}\n")
    command.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as rollout:
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        environment |= {"HOST": "127.0.0.1", "PORT": str(rollout.getsockname()[1])}
        environment["PATH"] = f"{tmp_path}:{REPOSITORY / '.venvs/cli/bin'}:{os.environ['PATH']}"
        command_line = [*container["command"], *container["args"]]
        ended = subprocess.run(command_line, env=environment, capture_output=True, text=True, timeout=30)
    assert answer in ended.stdout
    assert (ended.returncode == 0) is passes
