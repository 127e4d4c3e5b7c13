"""What services say about themselves, over HTTP."""

from __future__ import annotations

from collections.abc import Callable

import httpx

from forage_proto.v1.trajectory_pb2 import Policy, Replica
from forage_runtime.clients.health import (
    ask_service,
    describe_replica,
    format_wait,
    list_health_urls,
    read_readiness,
)
from forage_runtime.settings import Settings, TlsSettings
from forage_runtime.telemetry.health import Health, serve_health
from forage_runtime.telemetry.waits import waiting

OFF = TlsSettings()


def test_a_service_tells_its_readiness_notes_and_waits(free_address: Callable[[], str]) -> None:
    address = free_address()
    url = f"http://{address}/readyz"
    assert ask_service(url, OFF).state == "not running"
    health = Health()
    server = serve_health(address, health)
    try:
        assert ask_service(url, OFF).state == "not ready"
        assert ask_service(url, OFF).explain() == "starting"
        health.wait_for("policy", "none is served yet")
        assert ask_service(url, OFF).explain() == "starting; policy: none is served yet"
        health.mark_ready("policy")
        health.mark_started()
        health.set_notes({"backpressure": "the trainer is slow"})
        with waiting("gold", on="mine", limit_s=60):
            found = ask_service(url, OFF, clock=lambda: 0.0)
        assert found.is_ready
        assert not found.explain()
        assert found.list_lines()[0] == "note: the trainer is slow"
        assert found.list_lines()[1].startswith("waits for gold, on mine, since 0 s; gives up in ")
        assert ask_service(f"http://{address}/gone", OFF).state == "silent"
    finally:
        server.shutdown()


def test_the_answer_of_a_stranger_is_no_readiness() -> None:
    def read(status: int, text: str) -> tuple[str, str]:
        request = httpx.Request("GET", "http://h/readyz")
        found = read_readiness(httpx.Response(status, text=text, request=request))
        return found.state, found.explain()

    assert read(200, "[]") == ("silent", "silent")
    assert read(503, "no JSON") == ("silent", "silent")
    assert read(503, '{"waiting_for": {"start": "reading", "x": {"y": 1}}}') == ("not ready", "reading; x: {'y': 1}")
    assert read(503, '{"waiting_for": [1]}') == ("not ready", "not ready")
    assert read(403, '{"detail": "who?"}') == ("silent", "http://h/readyz answers 403: who?")


def test_every_service_has_an_address() -> None:
    settings = Settings()
    assert list_health_urls(settings)["rollout"] == f"http://{settings.rollout.health_address}/readyz"


def test_a_replica_is_described_as_a_clause() -> None:
    policy = Policy(version=3, epoch=7)
    assert describe_replica(Replica()) == "serves its own weights"
    refusing = Replica(serving=policy, refused=Policy(version=4), reason="digest differs")
    assert describe_replica(refusing) == "serves v3 (epoch 7), refuses v4: digest differs"
    assert describe_replica(Replica(serving=policy, out_of_service=True)) == "is out of service; serves v3 (epoch 7)"


def test_an_overdue_wait_says_so() -> None:
    wait = {"what": "gold", "on": "x", "detail": "", "count": 3, "idle": False, "waited_s": 70.0}
    wait["gives_up_in_s"] = -10.0
    assert format_wait(wait) == "waits for gold, 3 times, on x, since 70 s; should have given up 10 s ago"
