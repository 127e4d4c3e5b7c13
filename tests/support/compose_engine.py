"""Runs the stack of docker-compose.yml in a real Docker engine, with its own project name, ports and recipe."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import yaml
from deployment_tools import REPOSITORY, compose

T = TypeVar("T")
PROJECT = "forage-test"
PORTS = {
    "RETRIEVER_PORT": 28610,
    "ROLLOUT_GRPC_PORT": 28630,
    "ROLLOUT_HTTP_PORT": 28632,
    "CONSOLE_PORT": 28650,
    "PROMETHEUS_PORT": 28690,
    "GRAFANA_PORT": 28700,
}
BASE = "python:3.11-slim-bookworm"
STAND_INS = {"redis": "valkey", "prometheus": "prometheus", "exporter": "redis_exporter"}
"""Service → target of StandIns.Dockerfile, for an engine that cannot pull its image."""
_DOCKER = REPOSITORY / "tests/nightly/cli_deploy/docker"


class Stack:
    """A project of Docker Compose. Every method fails with the output of the command if the command fails."""

    def __init__(self, folder: Path, steps: int) -> None:
        recipe = yaml.safe_load((REPOSITORY / "configs/demo.yaml").read_text())
        recipe["trainer"] |= {"total_training_steps": steps, "save_freq": 1}
        recipe["data"]["val_max_samples"] = 8
        file = folder / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe))
        plugins = folder / "docker/cli-plugins"
        plugins.mkdir(parents=True)
        (plugins / "docker-compose").symlink_to(compose())
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("COMPOSE_", "FORAGE_"))},
            # Debian's client comes first: it builds without the buildx plugin, which newer clients need.
            "PATH": f"/usr/bin:{os.environ['PATH']}",
            "DOCKER_CONFIG": str(folder / "docker"),
            "COMPOSE_PROJECT_NAME": PROJECT,
            "RECIPE": str(file),
            **{name: str(port) for name, port in PORTS.items()},
        }
        self.up_options: list[str] = []

    def require(self) -> None:
        """Skip the test, with the reason, unless a Docker engine answers. Root starts Debian's engine if none runs."""
        if os.environ.get("FORAGE_DOCKER_TESTS") != "1":
            pytest.skip("builds images and trains in containers for many minutes: run `make test-compose`")
        if self._try("docker", "info"):
            return
        if os.geteuid() == 0 and shutil.which("dockerd"):
            subprocess.Popen(["dockerd"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
            for _ in range(30):
                if self._try("docker", "info"):
                    return
                time.sleep(1)
        pytest.skip("no Docker engine answers: start one, or apt-get install docker.io as root")

    def build(self) -> None:
        """Build or pull every image of the profile; those that no registry gives are built from Debian's packages."""
        if not self._has_or_pulls(BASE):
            self._run(str(_DOCKER / "base_image.sh"), BASE, timeout_s=600)
        dockerfile = (REPOSITORY / "services/Dockerfile").read_text()
        [(node, version)] = re.findall(r"(?m)^ARG NODE_IMAGE=(node:([\d.]+)\S*)$", dockerfile)
        if not self._has_or_pulls(node):
            self._build_stand_in("node", node, "--build-arg", f"VERSION={version}")
        # The engine's bridge network may lack name resolution; the host's network has it.
        self._run("scripts/images.sh", "--network", "host", timeout_s=3000)
        services = json.loads(self.compose("config", "--format", "json"))["services"]
        for service, target in STAND_INS.items():
            image = services[service]["image"]
            if not self._has_or_pulls(image):
                self._build_stand_in(target, image)
        if not self._has_or_pulls(services["grafana"]["image"]):
            self.up_options = ["--pull", "never", "--scale", "grafana=0"]

    def up(self) -> str:
        """Run `make up` and return its output."""
        return self._run("scripts/compose.sh", "up", *self.up_options, timeout_s=1800)

    def down(self, volumes: bool = False) -> None:
        """Run `make down`."""
        self._run("scripts/compose.sh", "down", timeout_s=700, **({"VOLUMES": "1"} if volumes else {}))

    def compose(self, *arguments: str, timeout_s: float = 120) -> str:
        return self._run("docker", "compose", *arguments, timeout_s=timeout_s)

    def inspect(self, service: str) -> dict[str, Any]:
        """Inspect the container of a service."""
        container = self.compose("ps", "--all", "--quiet", service).strip()
        details: dict[str, Any] = json.loads(self._run("docker", "inspect", container))[0]
        return details

    def read_exit_code(self, service: str) -> int | None:
        """Read the exit code of a service whose container has stopped for good; None while it runs."""
        state = self.inspect(service)["State"]
        return state["ExitCode"] if state["Status"] == "exited" else None

    def kill(self, service: str) -> None:
        """Kill the service's process with SIGKILL. `docker kill` would disable the restart policy."""
        self.compose("exec", service, "python", "-c", _KILL)

    def python(self, code: str) -> Any:
        """Run Python code with the settings and network of the `forage` command; returns the JSON that it prints."""
        return json.loads(self.compose("run", "--rm", "--no-deps", "--entrypoint", "python", "forage", "-c", code))

    def query(self, expression: str) -> dict[str, float]:
        """Query Prometheus: job → value."""
        url = f"http://127.0.0.1:{PORTS['PROMETHEUS_PORT']}/api/v1/query"
        reply = httpx.get(url, params={"query": expression}, timeout=60, trust_env=False).raise_for_status().json()
        return {series["metric"].get("job", ""): float(series["value"][1]) for series in reply["data"]["result"]}

    def wait_for(self, condition: Callable[[], T], timeout_s: float) -> T:
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise AssertionError(f"the condition is not met after {timeout_s} s:\n{self.read_logs()}")
            time.sleep(1)
        return value

    def read_logs(self) -> str:
        return self.compose("ps", "--all") + self.compose("logs", "--tail", "15")

    def list_resources(self) -> list[str]:
        """List the containers, networks and volumes of the project."""
        label = f"label=com.docker.compose.project={PROJECT}"
        kinds = (("ps", "--all"), ("network", "ls"), ("volume", "ls"))
        return " ".join(self._run("docker", *kind, "--quiet", "--filter", label) for kind in kinds).split()

    def _build_stand_in(self, target: str, image: str, *options: str) -> None:
        with (_DOCKER / "StandIns.Dockerfile").open() as dockerfile:
            self._run(
                "docker", "build", "--network", "host", "--target", target, "--tag", image, *options, "-",
                stdin=dockerfile, timeout_s=600,
            )  # fmt: skip

    def _has_or_pulls(self, image: str) -> bool:
        return self._try("docker", "image", "inspect", image) or self._try("docker", "pull", image)

    def _try(self, *command: str) -> bool:
        program = shutil.which(command[0], path=self.environment["PATH"])
        return (
            program is not None
            and subprocess.run(command, env=self.environment, capture_output=True, timeout=600).returncode == 0
        )

    def _run(self, *command: str, timeout_s: float = 120, stdin: Any = None, **environment: str) -> str:
        ended = subprocess.run(
            command, cwd=REPOSITORY, env=self.environment | environment, capture_output=True, text=True,
            timeout=timeout_s, stdin=stdin or subprocess.DEVNULL,
        )  # fmt: skip
        assert ended.returncode == 0, f"{' '.join(command)}: {ended.stdout[-2000:]}{ended.stderr[-4000:]}"
        return ended.stdout


_KILL = """
import os, pathlib
for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
    pid, parent = int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
    if parent == 1 and "forage_" in (stat.parent / "cmdline").read_text():
        os.kill(pid, 9)
        break
else:
    raise SystemExit("no process of the service")
"""
