"""`docker-compose.yml`, resolved by Docker Compose."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Mapping
from typing import Any

from deployment_tools import REPOSITORY, compose

FILE = REPOSITORY / "docker-compose.yml"
PROFILES = ("cpu", "gpu")
OURS = ("retriever", "reward", "rollout", "trainer", "cli")
"""What is built from this repository, by the name of its image."""
Object = dict[str, Any]


@functools.cache
def resolved(profile: str) -> Object:
    """The whole configuration of a profile, with the service `forage` that is run by hand."""
    found: Object = json.loads(config("--format", "json", COMPOSE_PROFILES=f"{profile},command").stdout)
    return found


def config(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`docker compose config`, with nothing but this in the environment."""
    return subprocess.run(
        [compose(), "--file", FILE, "config", *options],
        env={"PATH": os.environ["PATH"], **environment}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def part(service: Object) -> str | None:
    """Which of `OURS` a service runs."""
    repository, _, name = str(service["image"]).rpartition(":")[0].rpartition("/")
    return name if repository.split("/")[-1] == "forage" else None


def reachable(stack: Object, caller: Object) -> Mapping[str, Object]:
    """Name → service, of all that a service finds on its networks."""
    found: dict[str, Object] = {}
    for name, service in stack["services"].items():
        for network, options in service["networks"].items():
            if network in caller["networks"]:
                found |= {alias: service for alias in (name, *((options or {}).get("aliases") or ()))}
    return found
