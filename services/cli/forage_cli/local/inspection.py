"""What each service of a run does now: its processes, whether it answers, and what it waits for."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from forage_cli.local.family import RunProcess, list_processes
from forage_cli.local.stack import RECORD, Program, list_addresses, list_health_urls
from forage_common.addresses import split_address
from forage_common.errors import UnavailableError
from forage_common.settings import Settings
from forage_common.streams.client import StreamClient
from forage_common.v1.trajectory_pb2 import Replica

ANSWER_S = 2.0
"""Longest wait for an answer: a service that needs longer is silent."""
_EVERYTHING_S = 8.0


@dataclass
class Inspection:
    """What was found out about one service.

    state: ready, not ready, silent (it does not answer), starting (it does not listen yet), dead (its process has
    ended, and its supervisor has not started another one), or not running.
    processes: those on this machine that a supervisor has started for it; the first one is the service itself.
    """

    state: str = "not running"
    processes: list[RunProcess] = field(default_factory=list)
    waiting_for: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    waits: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def stopped(self) -> list[RunProcess]:
        return [process for process in self.processes if process.is_stopped]

    def list_lines(self) -> list[str]:
        """List what an operator should know, one sentence each."""
        lines = [f"{process} is stopped: kill -CONT {process.pid} lets it go on" for process in self.stopped]
        if self.state == "silent" and not self.stopped:
            lines.append(f"it has not answered for {ANSWER_S:g} s: forage status --stacks shows what it does")
        lines += [f"not ready: {what}: {detail}" for what, detail in self.waiting_for.items()]
        lines += [f"note: {detail}" for detail in self.notes.values()]
        return lines + [format_wait(wait) for wait in sorted(self.waits, key=lambda wait: bool(wait["idle"]))]


def describe_replica(replica: Replica) -> str:
    """What an engine serves and refuses, and whether it sleeps, as a clause."""
    serving = f"v{replica.serving.version} (epoch {replica.serving.epoch})"
    text = f"serves {serving if replica.HasField('serving') else 'its own weights'}"
    if replica.HasField("refused"):
        text += f", refuses v{replica.refused.version}: {replica.reason}"
    if replica.HasField("asleep"):
        return f"sleeps while the trainer computes on its GPUs; {text}"
    return f"is out of service; {text}" if replica.out_of_service else text


def inspect_run(settings: Settings, others: Iterable[Callable[[], None]] = ()) -> dict[Program, Inspection]:
    """Inspect every service of a run, at the same time; takes eight seconds at most, whatever hangs.

    Args:
        others: more to do meanwhile, such as reading from Redis.
    """
    found = {program: Inspection("silent") for program in Program}
    processes: dict[str, list[RunProcess]] = {}

    def ask(program: Program, url: str) -> None:
        found[program] = ask_service(url)

    def list_own() -> None:
        processes.update(list_processes(settings.run.folder.absolute() / RECORD))

    def ask_redis() -> None:
        found[Program.REDIS] = _ask_redis(settings)

    calls: list[Callable[[], None]] = [list_own, ask_redis, *others]
    for name, address in list_health_urls(settings).items():
        calls.append(lambda name=name, address=address: ask(name, address))  # type: ignore[misc]
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    deadline = time.monotonic() + _EVERYTHING_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    for program, one in found.items():
        one.processes = processes.get(program, [])
        if one.state == "not running" and program in processes:
            is_alive = any(process.is_main for process in one.processes)
            one.state = "silent" if one.stopped else "starting" if is_alive else "dead"
    return found


def ask_service(ready_url: str) -> Inspection:
    """Ask a service by HTTP for its readiness and its waits."""
    try:
        with httpx.Client(timeout=ANSWER_S, trust_env=False) as client:
            reply = client.get(ready_url)
            if reply.status_code not in (200, 503):
                return Inspection("silent", notes={"http": f"{ready_url} answers {reply.status_code}"})
            body = reply.json()
            waits = client.get(ready_url.replace("/readyz", "/waitz"))
            listed = waits.json()["waits"] if waits.status_code == 200 else []
    except httpx.ConnectError:
        return Inspection()
    except (httpx.TransportError, ValueError, KeyError):
        return Inspection("silent")
    state = "ready" if reply.status_code == 200 else "not ready"
    return Inspection(state, [], body.get("waiting_for", {}), body.get("notes", {}), listed)


def answers(program: Program, settings: Settings, timeout_s: float) -> bool | None:
    """Whether a service answers at all: its health endpoint, or Redis itself; None if nothing listens there."""
    try:
        if program is Program.REDIS:
            address = split_address(list_addresses(settings, [program])["redis.url"])
            with socket.create_connection(address, timeout_s) as connection:
                connection.settimeout(timeout_s)
                connection.sendall(b"PING\r\n")
                return bool(connection.recv(16))
        parts = urlsplit(list_health_urls(settings)[program])
        return httpx.get(f"http://{parts.netloc}/healthz", timeout=timeout_s, trust_env=False).is_success
    except (ConnectionRefusedError, httpx.ConnectError):
        return None
    except (OSError, httpx.HTTPError):
        return False


def format_wait(wait: Mapping[str, Any]) -> str:
    """Format a wait of `/waitz` as a sentence."""
    detail = f" ({wait['detail']})" if wait["detail"] else ""
    count = f", {wait['count']} times" if wait["count"] > 1 else ""
    verb = "idle: waits" if wait["idle"] else "waits"
    left = wait["gives_up_in_s"]
    if wait["idle"]:
        end = ""
    elif left is None:
        end = f"; has no limit: {wait['why_unlimited']}"
    else:
        end = f"; gives up in {left:.0f} s" if left >= 0 else f"; should have given up {-left:.0f} s ago"
    return f"{verb} for {wait['what']}{detail}{count}, on {wait['on']}, since {wait['waited_s']:.0f} s{end}"


def _ask_redis(settings: Settings) -> Inspection:
    quick = settings.redis.model_copy(update={"timeout_s": ANSWER_S / 2})
    try:
        StreamClient(quick, settings.run.id, patience_s=ANSWER_S).ping()
    except UnavailableError as error:
        # A server that does not listen is down; one that listens and gives no answer, or refuses, is there.
        if "refused" in str(error):
            return Inspection()
        return Inspection("silent", notes={"redis": str(error)})
    return Inspection("ready")
