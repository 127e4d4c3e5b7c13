"""The environment of a Ray that a service starts for itself: on loopback, behind a token, quiet, patient."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from forage_runtime.errors import ForageError

START_LIMIT_S = 300
LOOK_S = 10
"""So long a look for Ray's own node waits; between two looks `extend_start_limit` sees whether it can still come."""
FOLDER_PREFIX = "forage-ray-"
LONGEST_SOCKET = f"{FOLDER_PREFIX}12345678/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""As long as the path of any socket of a Ray below the folder of temporary files."""
_ENVIRONMENT = {
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # despite its name, this binds Ray's sockets to loopback
    "RAY_DEDUP_LOGS": "0",  # Ray would hold back a line of one worker that is like another one's, and count the next
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "error",
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",  # it would abort the main process on SIGTERM
    "RAY_agent_register_timeout_ms": "180000",
    "RAY_enable_metrics_collection": "0",
    "RAY_grpc_enable_http_proxy": "0",  # Ray's default, which the environment may not change
    "RAY_gcs_server_port_wait_time_s": str(START_LIMIT_S),
    "RAY_raylet_start_wait_time_s": str(LOOK_S),
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_worker_niceness": "0",  # Ray would lower the priority of its workers, which serve requests
}


def ray_environment() -> dict[str, str]:
    """Environment variables to set before Ray is imported, with a new token."""
    return _ENVIRONMENT | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}


class RayletEndedError(ForageError):
    """The raylet of a Ray that is starting has ended. No RuntimeError: Ray catches those, and waits on."""


@contextmanager
def extend_start_limit(folder: Path, limit_s: float = START_LIMIT_S) -> Iterator[None]:
    """Let a `ray.init` within the block wait this long for its node, as long as its raylet lives.

    Ray gives up after 30 s, a constant that no setting changes; on a busy machine its processes need longer.

    Args:
        folder: Ray's folder of temporary files, with its logs.

    Raises:
        RayletEndedError: the raylet has ended; the message has the last line that it wrote.
    """
    from ray._private import services

    look_up = services.get_node

    def wait_for_node(*arguments: Any) -> Any:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return look_up(*arguments)
            except RuntimeError as error:  # the node is not known yet
                if has_raylet_ended():
                    raise RayletEndedError(f"Ray's raylet ended before it was ready: {_read_raylet(folder)}") from error
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)  # wait: until a start that has a time limit is over

    services.get_node = wait_for_node
    try:
        yield
    finally:
        services.get_node = look_up


def has_raylet_ended() -> bool:
    """Whether the raylet that this process has started last is dead: a zombie, as nobody has waited for it."""
    states = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = file.read_bytes().partition(b"(")[2].rpartition(b")")
            state, parent = rest.split()[:2]
            if name == b"raylet" and int(parent) == os.getpid():
                states.append(state)
    return bool(states) and set(states) == {b"Z"}


def _read_raylet(folder: Path) -> str:
    """The last line that the raylet wrote."""
    for file in (*folder.glob("session_*/logs/raylet.err"), *folder.glob("session_*/logs/raylet.out")):
        if lines := [line for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]:
            return lines[-1][:500]
    return "it wrote nothing"
