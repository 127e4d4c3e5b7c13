"""The page Health: every service of a run, asked at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from upath import UPath

from forage_console.live.inquiries import Inquiries, Inquiry
from forage_console.live.run_services import describe_end, load_run_settings, open_streams
from forage_console.models.services import HealthDetail, QueueRow, RedisRow, ReplicaRow, ServiceRow, WaitRow
from forage_console.reading.detail import read_restarts
from forage_console.reading.files import is_alive
from forage_proto.v1.trajectory_pb2 import Policy, Replica
from forage_runtime.clients.calls import RefusedError
from forage_runtime.clients.health import (
    ANSWER_S,
    ServiceHealth,
    ask_service,
    describe_replica,
    list_health_urls,
    name_ready,
)
from forage_runtime.errors import ForageError
from forage_runtime.settings import Settings

LIMIT_S = 3.0
"""Longest time of a look, whatever hangs: it shows what has no answer yet as slow, and a later look has the answer."""
_FRESH_S = 1.0
_LOG_LINES, _LOG_BYTES, _LINE_LENGTH = 20, 32 * 1024, 2000
_WELL = ("ready", "slow")
_ORDER = ("redis", "reward", "retriever", "rollout", "trainer", "console")


@dataclass
class _Streams:
    """What Redis says; nothing where it does not answer. knows: whether it has something of this run, if it said so."""

    state: str = "silent"
    notes: Mapping[str, str] = field(default_factory=dict)
    answered_s: float | None = None
    knows: bool | None = None
    policy: Policy | None = None
    replicas: dict[str, Replica] = field(default_factory=dict)
    queues: list[QueueRow] = field(default_factory=list)
    redis: RedisRow | None = None


_HEALTH: Inquiries[ServiceHealth] = Inquiries()
_STREAMS: Inquiries[_Streams] = Inquiries()
_State = TypeVar("_State", ServiceHealth, _Streams)


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
    deadline = time.monotonic() + LIMIT_S
    urls = list_health_urls(settings)
    reading = _STREAMS.begin(f"{settings.redis.url} {settings.run.id}", lambda: _read_streams(settings))
    asking = {
        name: _HEALTH.begin(url, lambda url=url: ask_service(url, settings.tls))  # type: ignore[misc]
        for name, url in urls.items()
    }
    found = _read_answer(_STREAMS, reading, _Streams, deadline)
    health = {name: _read_answer(_HEALTH, one, ServiceHealth, deadline) for name, one in asking.items()}
    if not found.knows and not is_alive(folder):
        is_late = found.state == "slow" and found.knows is None
        return _describe_unreachable(folder, _describe_lateness(folder) if is_late else describe_end(folder))
    restarts = read_restarts(folder)
    states = {"redis": ServiceHealth(found.state, notes=found.notes, answered_s=found.answered_s), **health}
    addresses = {"redis": settings.redis.url.rpartition("@")[2], **urls}
    rows = [_describe(folder, name, states[name], addresses[name], restarts.get(name, 0)) for name in _ORDER]
    is_reachable = any(state.state in ("ready", "slow", "not ready") for state in states.values())
    troubled = [row.name for row in rows if row.name not in ("console", "trainer") and row.state not in _WELL]
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


def _describe_lateness(folder: UPath) -> str:
    return f"Redis has not answered yet whether the services are those of {folder.name}"


def _read_answer(
    inquiries: Inquiries[_State], one: Inquiry[_State], make: Callable[..., _State], deadline: float
) -> _State:
    """What a service answered by then; else that it is slow, or silent: for too long now, or in its last answer."""
    one.over.wait(max(0.0, deadline - time.monotonic()))  # wait: three seconds at most
    answer = inquiries.read(one)
    if not isinstance(answer, float):
        return answer
    if one.before is not None and one.before.state == "silent":
        return one.before
    if answer > ANSWER_S or one.ended is not None:
        return make("silent")
    return make("slow", notes={"late": f"slow: no answer yet after {answer:.1f} s"})


def _read_streams(settings: Settings) -> _Streams:
    found, begun = _Streams(), time.monotonic()
    try:
        client = open_streams(settings)
        client.ping()
        found.answered_s = time.monotonic() - begun
        found.state = name_ready(found.answered_s)
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
        problem = " ".join(str(error).split())[:300]
        found.state, found.notes = "not running" if "refused" in problem else "silent", {"redis": problem}
    return found


def _describe(folder: UPath, name: str, health: ServiceHealth, address: str, restarts: int) -> ServiceRow:
    return ServiceRow(
        name=name,
        state=health.state,
        address=address.removesuffix("/readyz"),
        waiting_for=dict(health.waiting_for),
        notes=[*health.list_delays(), *health.notes.values()],
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
            found = stream.read(_LOG_BYTES)
    except (OSError, ValueError):
        return []
    lines = found.splitlines()[1 if size > _LOG_BYTES else 0 :]  # of bytes: progress bars write carriage returns
    return [line.decode(errors="replace")[:_LINE_LENGTH] for line in lines[-_LOG_LINES:]]
