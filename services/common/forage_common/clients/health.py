"""What services say about themselves: readiness, notes and waits over HTTP, and what each engine serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from forage_common.settings import Settings
from forage_common.v1.trajectory_pb2 import Replica

ANSWER_S = 2.0
"""Longest wait for an answer: a service that needs longer is silent."""


@dataclass
class ServiceHealth:
    """What a service says about itself.

    state: ready, not ready, silent (it does not answer), or not running (it does not listen).
    """

    state: str = "not running"
    waiting_for: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    waits: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    def list_lines(self) -> list[str]:
        """List what an operator should know, one sentence each."""
        lines = [f"not ready: {what}: {detail}" for what, detail in self.waiting_for.items()]
        lines += [f"note: {detail}" for detail in self.notes.values()]
        return lines + [format_wait(wait) for wait in sorted(self.waits, key=lambda wait: bool(wait["idle"]))]


def list_health_urls(settings: Settings) -> dict[str, str]:
    """Service → URL of its readiness check."""
    return {
        "reward": f"http://{settings.reward.health_address}/readyz",
        "retriever": f"http://{settings.retriever.http_address}/readyz",
        "rollout": f"http://{settings.rollout.health_address}/readyz",
        "trainer": f"http://{settings.trainer.health_address}/readyz",
        "console": f"http://{settings.console.http_address}/readyz",
    }


def ask_service(ready_url: str) -> ServiceHealth:
    """Ask a service by HTTP for its readiness and its waits."""
    try:
        with httpx.Client(timeout=ANSWER_S, trust_env=False) as client:
            reply = client.get(ready_url)
            if reply.status_code not in (200, 503):
                return ServiceHealth("silent", notes={"http": f"{ready_url} answers {reply.status_code}"})
            body = reply.json()
            waits = client.get(ready_url.replace("/readyz", "/waitz"))
            listed = waits.json()["waits"] if waits.status_code == 200 else []
    except httpx.ConnectError:
        return ServiceHealth()
    except (httpx.TransportError, ValueError, KeyError):
        return ServiceHealth("silent")
    state = "ready" if reply.status_code == 200 else "not ready"
    return ServiceHealth(state, body.get("waiting_for", {}), body.get("notes", {}), listed)


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
    if replica.HasField("refused"):
        text += f", refuses v{replica.refused.version}: {replica.reason}"
    if replica.HasField("asleep"):
        return f"sleeps while the trainer computes on its GPUs; {text}"
    return f"is out of service; {text}" if replica.out_of_service else text
