"""The environment of a Ray that a service starts for itself: on loopback, behind a token, quiet."""

from __future__ import annotations

import secrets

_ENVIRONMENT = {
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # despite its name, this binds Ray's sockets to loopback
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "error",
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",  # it would abort the main process on SIGTERM
    "RAY_agent_register_timeout_ms": "180000",
    "RAY_enable_metrics_collection": "0",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_worker_niceness": "0",  # Ray would lower the priority of its workers, which serve requests
}


def ray_environment() -> dict[str, str]:
    """Environment variables to set before Ray is imported, with a new token."""
    return _ENVIRONMENT | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
