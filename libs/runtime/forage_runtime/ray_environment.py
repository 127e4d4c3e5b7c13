"""The environment of a Ray that a service starts for itself: on loopback, behind a token, quiet, patient."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

START_LIMIT_S = 300
FOLDER_PREFIX = "forage-ray-"
LONGEST_SOCKET = f"{FOLDER_PREFIX}12345678/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""As long as the path of any socket of a Ray below the folder of temporary files."""
_ENVIRONMENT = {
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # despite its name, this binds Ray's sockets to loopback
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "error",
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",  # it would abort the main process on SIGTERM
    "RAY_agent_register_timeout_ms": "180000",
    "RAY_enable_metrics_collection": "0",
    "RAY_grpc_enable_http_proxy": "0",  # Ray's default, which the environment may not change
    "RAY_gcs_server_port_wait_time_s": str(START_LIMIT_S),
    "RAY_raylet_start_wait_time_s": str(START_LIMIT_S),
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_worker_niceness": "0",  # Ray would lower the priority of its workers, which serve requests
}


def ray_environment() -> dict[str, str]:
    """Environment variables to set before Ray is imported, with a new token."""
    return _ENVIRONMENT | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}


@contextmanager
def extend_start_limit(limit_s: float = START_LIMIT_S) -> Iterator[None]:
    """Let a `ray.init` within the block wait this long for its node.

    Ray gives up after 30 s, a constant that no setting changes; on a busy machine its processes need longer.
    """
    from ray._private import services

    look_up = services.get_node

    def wait_for_node(*arguments: Any) -> Any:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return look_up(*arguments)
            except RuntimeError:  # the node is not known yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)  # wait: until a start that has a time limit is over

    services.get_node = wait_for_node
    try:
        yield
    finally:
        services.get_node = look_up
