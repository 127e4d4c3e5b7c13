"""What services say about themselves: readiness, notes and waits over HTTP, and what each engine serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from forage_proto.v1.trajectory_pb2 import Replica
from forage_runtime.clients.outgoing import UnboundedReplyError, bound_blocking_replies
from forage_runtime.errors import SettingsError
from forage_runtime.security.handshakes import explain_tls
from forage_runtime.security.tls import http_scheme, make_client_context
from forage_runtime.settings import Settings, TlsSettings

_MAX_REPLY_BYTES = 2**20
SLOW_S = 2.0
"""A service whose answer takes longer is slow."""
ANSWER_S = 15.0
"""Longest wait for an answer: a service that needs longer is silent. Busy machines let services answer late."""


@dataclass
class ServiceHealth:
    """What a service says about itself.

    state: ready, slow (it is ready, and answered late), not ready, silent (it does not answer within `ANSWER_S`), or
        not running (it does not listen).
    answered_s: seconds that its answer took; None without one.
    """

    state: str = "not running"
    waiting_for: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    waits: list[dict[str, Any]] = field(default_factory=list)
    answered_s: float | None = None

    @property
    def is_ready(self) -> bool:
        return self.state in ("ready", "slow")

    def explain(self) -> str:
        """Explain why it is not ready, as a clause; empty if it is."""
        if self.is_ready:
            return ""
        waiting = [detail if what == "start" else f"{what}: {detail}" for what, detail in self.waiting_for.items()]
        known = "; ".join([*waiting, *self.notes.values()])
        return known or ("starting" if self.state == "not running" else self.state)

    def list_delays(self) -> list[str]:
        """Say how long the answer took, if it was late."""
        late = self.answered_s is not None and self.answered_s > SLOW_S
        return [f"slow: answered after {self.answered_s:.1f} s"] if late else []

    def list_lines(self) -> list[str]:
        """List what an operator should know, one sentence each."""
        lines = [f"not ready: {what}: {detail}" for what, detail in self.waiting_for.items()]
        lines += self.list_delays()
        lines += [f"note: {detail}" for detail in self.notes.values()]
        return lines + [format_wait(wait) for wait in sorted(self.waits, key=lambda wait: bool(wait["idle"]))]


def name_ready(answered_s: float) -> str:
    """Name the state of a service that is ready and answered after so many seconds."""
    return "slow" if answered_s > SLOW_S else "ready"


def list_health_urls(settings: Settings) -> dict[str, str]:
    """Service → URL of its readiness check."""
    addresses = {
        "reward": settings.reward.health_address,
        "retriever": settings.retriever.http_address,
        "rollout": settings.rollout.health_address,
        "trainer": settings.trainer.health_address,
        "console": settings.console.http_address,
    }
    return {name: f"{http_scheme(settings.tls)}://{address}/readyz" for name, address in addresses.items()}


def open_client(tls: TlsSettings) -> httpx.Client:
    """Open a client that asks services of these certificates, and waits for `ANSWER_S` at most.

    Raises:
        SettingsError: a file of the certificates is wrong.
    """
    return httpx.Client(timeout=ANSWER_S, verify=make_client_context(tls), **bound_blocking_replies(_MAX_REPLY_BYTES))


def ask_service(ready_url: str, tls: TlsSettings, clock: Callable[[], float] = time.monotonic) -> ServiceHealth:
    """Ask a service by HTTP for its readiness and its waits."""
    try:
        with open_client(tls) as client:
            health = ask_readiness(ready_url, client, clock)
            if health.answered_s is not None:
                waits = client.get(ready_url.replace("/readyz", "/waitz"))
                health.waits = waits.json()["waits"] if waits.status_code == 200 else []
            return health
    except SettingsError as error:
        return ServiceHealth("silent", notes={"tls": str(error)})
    except (httpx.TransportError, ValueError, KeyError, TypeError, RecursionError, UnboundedReplyError):
        return ServiceHealth("silent")


def ask_readiness(ready_url: str, client: httpx.Client, clock: Callable[[], float] = time.monotonic) -> ServiceHealth:
    """Ask a service for its readiness alone, with an open client of `open_client`."""
    try:
        begun = clock()
        reply = client.get(ready_url)
        return read_readiness(reply, clock() - begun)
    except httpx.TransportError as error:
        if why := explain_tls(error):
            return ServiceHealth("silent", notes={"tls": why})
        return ServiceHealth() if isinstance(error, httpx.ConnectError) else ServiceHealth("silent")
    except UnboundedReplyError:
        return ServiceHealth("silent")


def read_readiness(reply: httpx.Response, answered_s: float = 0.0) -> ServiceHealth:
    """Read the answer to `/readyz`, which may be a stranger's."""
    try:
        body = reply.json()
    except (ValueError, RecursionError):
        body = None
    is_ours = isinstance(body, dict)
    if reply.status_code not in (200, 503):
        detail = f": {body['detail']}"[:300] if is_ours and "detail" in body else ""
        return ServiceHealth("silent", notes={"http": f"{reply.url} answers {reply.status_code}{detail}"})
    if not is_ours:
        return ServiceHealth("silent")
    state = name_ready(answered_s) if reply.status_code == 200 else "not ready"
    waiting_for, notes = (_read_texts(body.get(name)) for name in ("waiting_for", "notes"))
    return ServiceHealth(state, waiting_for, notes, answered_s=answered_s)


def _read_texts(value: object) -> dict[str, str]:
    return {str(name): str(text) for name, text in value.items()} if isinstance(value, dict) else {}


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


def describe_replica(replica: Replica) -> str:
    """What an engine serves and refuses, and whether it sleeps, as a clause."""
    serving = f"v{replica.serving.version} (epoch {replica.serving.epoch})"
    text = f"serves {serving if replica.HasField('serving') else 'its own weights'}"
    if replica.HasField("difference"):
        text += f", {replica.difference:.1g} nats from the trainer"
    if replica.HasField("refused"):
        text += f", refuses v{replica.refused.version}: {replica.reason}"
    if replica.HasField("asleep"):
        return f"sleeps while the trainer computes on its GPUs; {text}"
    return f"is out of service; {text}" if replica.out_of_service else text
