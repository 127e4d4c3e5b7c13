"""The stack of docker-compose.yml in a real Docker engine, under a project name, ports and a recipe of its own."""

from __future__ import annotations

import json
import os
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
    "PROMETHEUS_PORT": 28690,
    "GRAFANA_PORT": 28700,
}
BASE = "python:3.11-slim-bookworm"
STAND_INS = {"redis": "valkey", "prometheus": "prometheus", "exporter": "redis_exporter"}
"""Service → target of StandIns.Dockerfile, where its image can be had from no registry."""
_DOCKER = REPOSITORY / "tests/deploy/cli/docker"


class Stack:
    """Docker Compose's project. Every call raises when the command fails, with what it said."""

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
            # Debian's client first: it builds without the plugin that later ones ask for.
            "PATH": f"/usr/bin:{os.environ['PATH']}",
            "DOCKER_CONFIG": str(folder / "docker"),
            "COMPOSE_PROJECT_NAME": PROJECT,
            "RECIPE": str(file),
            **{name: str(port) for name, port in PORTS.items()},
        }
        self.without: list[str] = []

    def require(self) -> None:
        """Skip, with the reason, unless a Docker engine answers. Root starts Debian's where none runs."""
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
        """Every image of the profile: ours as they stand, others from a registry or of Debian's packages."""
        if not self._had(BASE):
            self._run(str(_DOCKER / "base_image.sh"), BASE, timeout_s=600)
        # The engine's own network may have no names: the host's has.
        self._run("scripts/images.sh", "--network", "host", timeout_s=3000)
        services = json.loads(self.compose("config", "--format", "json"))["services"]
        for service, target in STAND_INS.items():
            image = services[service]["image"]
            if not self._had(image):
                with (_DOCKER / "StandIns.Dockerfile").open() as dockerfile:
                    self._run(
                        "docker", "build", "--network", "host", "--target", target, "--tag", image, "-",
                        stdin=dockerfile, timeout_s=600,
                    )  # fmt: skip
        if not self._had(services["grafana"]["image"]):
            self.without = ["--pull", "never", "--scale", "grafana=0"]

    def up(self) -> str:
        """`make up`; its words."""
        return self._run("scripts/compose.sh", "up", *self.without, timeout_s=1800)

    def down(self, volumes: bool = False) -> None:
        """`make down`."""
        self._run("scripts/compose.sh", "down", timeout_s=700, **({"VOLUMES": "1"} if volumes else {}))

    def compose(self, *arguments: str, timeout_s: float = 120) -> str:
        return self._run("docker", "compose", *arguments, timeout_s=timeout_s)

    def state(self, service: str) -> dict[str, Any]:
        """What the engine knows of a service's container."""
        container = self.compose("ps", "--all", "--quiet", service).strip()
        found: dict[str, Any] = json.loads(self._run("docker", "inspect", container))[0]
        return found

    def ended(self, service: str) -> int | None:
        """The exit code of a container that is not coming back; None while it runs."""
        state = self.state(service)["State"]
        return state["ExitCode"] if state["Status"] == "exited" else None

    def kill(self, service: str) -> None:
        """kill -9 the service's process, behind the engine's back: its own `kill` would rule a restart out."""
        self.compose("exec", service, "python", "-c", _KILL)

    def python(self, code: str) -> Any:
        """What a Python program, with the settings and the network of the `forage` command, prints as JSON."""
        return json.loads(self.compose("run", "--rm", "--no-deps", "--entrypoint", "python", "forage", "-c", code))

    def query(self, expression: str) -> dict[str, float]:
        """What Prometheus answers: job → value."""
        url = f"http://127.0.0.1:{PORTS['PROMETHEUS_PORT']}/api/v1/query"
        found = httpx.get(url, params={"query": expression}, timeout=10, trust_env=False).raise_for_status().json()
        return {one["metric"].get("job", ""): float(one["value"][1]) for one in found["data"]["result"]}

    def wait_for(self, condition: Callable[[], T], timeout_s: float) -> T:
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            if time.monotonic() > deadline:
                raise AssertionError(f"it did not happen in {timeout_s} s:\n{self.logs()}")
            time.sleep(1)
        return found

    def logs(self) -> str:
        return self.compose("ps", "--all") + self.compose("logs", "--tail", "15")

    def leftovers(self) -> list[str]:
        """Containers, networks and volumes of the project."""
        label = f"label=com.docker.compose.project={PROJECT}"
        kinds = (("ps", "--all"), ("network", "ls"), ("volume", "ls"))
        return " ".join(self._run("docker", *kind, "--quiet", "--filter", label) for kind in kinds).split()

    def _had(self, image: str) -> bool:
        return self._try("docker", "image", "inspect", image) or self._try("docker", "pull", image)

    def _try(self, *command: str) -> bool:
        found = shutil.which(command[0], path=self.environment["PATH"])
        return (
            found is not None
            and subprocess.run(command, env=self.environment, capture_output=True, timeout=600).returncode == 0
        )

    def _run(self, *command: str, timeout_s: float = 120, stdin: Any = None, **environment: str) -> str:
        done = subprocess.run(
            command, cwd=REPOSITORY, env=self.environment | environment, capture_output=True, text=True,
            timeout=timeout_s, stdin=stdin or subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout


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
