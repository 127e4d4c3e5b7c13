"""Reads `docker-compose.yml` as Docker Compose resolves it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deployment_tools import REPOSITORY, compose

FILE = REPOSITORY / "docker-compose.yml"
PROFILES = ("cpu", "gpu")
SERVICES = ("retriever", "reward", "rollout", "trainer", "console", "cli")
"""Images that are built from this repository."""
Object = dict[str, Any]


@functools.cache
def resolve_profile(profile: str) -> Object:
    """Resolve the configuration of a profile, including the service `forage`, which users run by hand."""
    stack: Object = json.loads(run_config("--format", "json", COMPOSE_PROFILES=f"{profile},command").stdout)
    return stack


def run_config(*options: str, files: Sequence[Path] = (FILE,), **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `docker compose config` over files, with only these variables in the environment."""
    return subprocess.run(
        [compose(), *(word for file in files for word in ("--file", file)), "config", *options],
        env={"PATH": os.environ["PATH"], **environment}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def find_image_service(service: Object) -> str | None:
    """Which of `SERVICES` a container runs, by its image; None for the others."""
    repository, _, name = str(service["image"]).rpartition(":")[0].rpartition("/")
    return name if repository.split("/")[-1] == "forage" else None


def list_reachable(stack: Object, caller: Object) -> Mapping[str, Object]:
    """List all services on the networks of `caller`, by name and alias."""
    services: dict[str, Object] = {}
    for name, service in stack["services"].items():
        for network, options in service["networks"].items():
            if network in caller["networks"]:
                services |= {alias: service for alias in (name, *((options or {}).get("aliases") or ()))}
    return services
