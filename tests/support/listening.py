"""Where processes listen."""

from __future__ import annotations

import psutil

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def list_listening(top: int) -> dict[str, list[str]]:
    """Address that a process, or one below it, listens on → "name:port" of each."""
    found: dict[str, list[str]] = {}
    process = psutil.Process(top)
    for one in [process, *process.children(recursive=True)]:
        try:
            connections = one.net_connections(kind="inet")
        except psutil.NoSuchProcess:
            continue
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN:
                found.setdefault(connection.laddr.ip, []).append(f"{one.name()}:{connection.laddr.port}")
    return found
