"""The page Health: every service of a run, asked at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upath import UPath

from forage_common.clients.calls import RefusedError
from forage_common.clients.health import ServiceHealth, ask_service, describe_replica, list_health_urls
from forage_common.errors import ForageError
from forage_common.settings import Settings
from forage_common.v1.trajectory_pb2 import Policy, Replica
from forage_console.live.run_services import describe_end, is_alive, load_run_settings, open_streams
from forage_console.models.services import HealthDetail, QueueRow, RedisRow, ReplicaRow, ServiceRow, WaitRow
from forage_console.reading.detail import read_restarts

LIMIT_S = 3.0
"""Longest time of a look, whatever hangs."""
_FRESH_S = 1.0
_LOG_LINES, _LOG_BYTES, _LINE_LENGTH = 20, 32 * 1024, 2000
_ASKING = threading.Lock()
_asked: set[str] = set()
"""Addresses that are being asked."""
_ORDER = ("redis", "reward", "retriever", "rollout", "trainer", "console")


@dataclass
class _Streams:
    """What Redis says; nothing where it does not answer. knows: whether it has something of this run."""

    state: str = "silent"
    problem: str = ""
    knows: bool = False
    policy: Policy | None = None
    replicas: dict[str, Replica] = field(default_factory=dict)
    queues: list[QueueRow] = field(default_factory=list)
    redis: RedisRow | None = None


class HealthChecks:
    """Looks at the services of runs; pages that ask within a second get the same look. Thread-safe."""

    def __init__(self, own: Settings) -> None:
        self._own = own
        self._looks: dict[str, tuple[float, HealthDetail]] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def look(self, folder: UPath) -> HealthDetail:
        """What every service of a run does now."""
        with self._lock:
            lock = self._locks.setdefault(folder.name, threading.Lock())
        with lock:
            at, detail = self._looks.get(folder.name, (0.0, None))
            if detail is None or time.monotonic() - at > _FRESH_S:
                detail = inspect(folder, self._own)
                self._looks[folder.name] = time.monotonic(), detail
            return detail


def inspect(folder: UPath, own: Settings) -> HealthDetail:
    """Ask every service of a run; takes three seconds at most."""
    try:
        settings = load_run_settings(folder, own)
    except RefusedError as error:
        return _describe_unreachable(folder, str(error))
    health: dict[str, ServiceHealth] = {}
    found = _Streams()
    calls: list[Callable[[], None]] = [lambda: _read_streams(settings, found)]
    urls = list_health_urls(settings)
    for name, url in urls.items():
        calls.append(lambda name=name, url=url: _ask(name, url, settings, health))  # type: ignore[misc]
    _call_all(calls)
    belongs = found.knows or is_alive(folder)
    if not belongs:
        return _describe_unreachable(folder, describe_end(folder))
    restarts = read_restarts(folder)
    redis = ServiceHealth(found.state, notes={"redis": found.problem} if found.problem else {})
    states = {"redis": redis, **{name: health.get(name, ServiceHealth("silent")) for name in urls}}
    addresses = {"redis": settings.redis.url.rpartition("@")[2], **urls}
    rows = [_describe(folder, name, states[name], addresses[name], restarts.get(name, 0)) for name in _ORDER]
    is_reachable = any(state.state in ("ready", "not ready") for state in states.values())
    troubled = [row.name for row in rows if row.name not in ("console", "trainer") and row.state != "ready"]
    problem = f"not ready: {', '.join(troubled)}" if troubled else None
    return HealthDetail(
        checked=time.time(),
        is_reachable=is_reachable,
        problem=problem if is_reachable else describe_end(folder),
        services=rows,
        version=found.policy.version if found.policy else None,
        epoch=found.policy.epoch if found.policy else None,
        replicas=[_describe_replica(name, replica) for name, replica in sorted(found.replicas.items())],
        queues=found.queues,
        redis=found.redis,
    )


def _describe_unreachable(folder: UPath, problem: str) -> HealthDetail:
    restarts = read_restarts(folder)
    return HealthDetail(
        checked=time.time(),
        is_reachable=False,
        problem=problem,
        services=[_describe(folder, name, ServiceHealth(), "", restarts.get(name, 0)) for name in _ORDER[:-1]],
        version=None,
        epoch=None,
        replicas=[],
        queues=[],
        redis=None,
    )


def _call_all(calls: list[Callable[[], None]]) -> None:
    """Make all calls at the same time, and wait for those that end in time."""
    deadline = time.monotonic() + LIMIT_S
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))  # wait: three seconds at most


def _ask(name: str, url: str, settings: Settings, health: dict[str, ServiceHealth]) -> None:
    """Ask a service, unless an earlier look still waits for it: it is silent then, and looks do not add up."""
    with _ASKING:
        if url in _asked:
            return
        _asked.add(url)
    try:
        health[name] = ask_service(url, settings.tls)
    finally:
        with _ASKING:
            _asked.discard(url)


def _read_streams(settings: Settings, found: _Streams) -> None:
    try:
        client = open_streams(settings)
        client.ping()
        found.state = "ready"
        found.policy = client.read_policy()
        found.knows = found.policy is not None or client.read_epoch() > 0
        found.replicas = client.read_replicas() if found.policy is not None else {}
        for name, stream in (("prompts", client.prompts), ("trajectories", client.trajectories)):
            found.queues.append(
                QueueRow(name=name, entries=client.count_backlog(stream), bytes=client.measure_bytes(stream))
            )
        memory, clients = client.read_server("memory"), client.read_server("clients")
        found.redis = RedisRow(
            used_bytes=int(memory["used_memory"]),
            max_bytes=int(memory["maxmemory"]) or None,
            policy=str(memory.get("maxmemory_policy", "")),
            clients=int(clients["connected_clients"]),
        )
    except (ForageError, KeyError, ValueError, OSError) as error:
        # A server that does not listen is down; one that listens and gives no answer, or refuses, is there.
        found.problem = " ".join(str(error).split())[:300]
        found.state = "not running" if "refused" in found.problem else "silent"


def _describe(folder: UPath, name: str, health: ServiceHealth, address: str, restarts: int) -> ServiceRow:
    return ServiceRow(
        name=name,
        state=health.state,
        address=address.removesuffix("/readyz"),
        waiting_for={str(what): str(detail) for what, detail in health.waiting_for.items()},
        notes=[str(note) for note in health.notes.values()],
        waits=[_describe_wait(wait) for wait in sorted(health.waits, key=lambda wait: bool(wait.get("idle")))],
        restarts=restarts,
        log=read_log_end(folder, name),
    )


def _describe_wait(wait: dict[str, Any]) -> WaitRow:
    left = wait.get("gives_up_in_s")
    return WaitRow(
        what=str(wait.get("what", "")),
        on=str(wait.get("on", "")),
        detail=str(wait.get("detail", "")),
        waited_s=float(wait.get("waited_s", 0)),
        gives_up_in_s=None if left is None else float(left),
        why_unlimited=str(wait.get("why_unlimited") or "") or None,
        is_idle=bool(wait.get("idle")),
        count=int(wait.get("count", 1)),
    )


def _describe_replica(name: str, replica: Replica) -> ReplicaRow:
    serves = replica.HasField("serving")
    return ReplicaRow(
        name=name,
        version=replica.serving.version if serves else None,
        epoch=replica.serving.epoch if serves else None,
        text=describe_replica(replica),
        is_out_of_service=replica.out_of_service,
    )


def read_log_end(folder: UPath, name: str) -> list[str]:
    """Read the last lines of a service's log; none where it has no log in the folder of its run."""
    file = folder / "logs" / f"{name}.log"
    try:
        if isinstance(file, Path) and not file.resolve().is_relative_to(folder.resolve()):
            return []
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - _LOG_BYTES))
            text = stream.read(_LOG_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return []
    lines = text.splitlines()[1 if size > _LOG_BYTES else 0 :]
    return [line[:_LINE_LENGTH] for line in lines[-_LOG_LINES:]]
