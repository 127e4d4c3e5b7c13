"""A proxy in the environment, as companies and clusters set it: calls between services never use it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from failing_server import FailingServer, server
from otlp_receiver import receive_grpc, receive_http
from reward_replica import ITEMS, Replica

from forage_runtime.clients.health import ask_service
from forage_runtime.clients.outgoing import BlockingClient
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.clients.reward import RewardClient
from forage_runtime.settings import Settings, TlsSettings, load_settings
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.health import Health, serve_health

NAMES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
__all__ = ["server"]


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A proxy that every variable names; the connections that it gets, which it ends."""
    connections: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    connection, peer = listener.accept()
                except OSError:
                    return
                connections.append(peer)
                connection.close()

        for name in NAMES:
            monkeypatch.setenv(name, f"http://127.0.0.1:{listener.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        threading.Thread(target=accept, daemon=True).start()
        yield connections
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("has_token", [False, True])
async def test_grpc_calls_go_past_it(
    free_address: Callable[[], str], asked: list[Any], tmp_path: Path, has_token: bool
) -> None:
    replica, token_file = Replica(free_address()), tmp_path / "token"
    token_file.write_text("secret\n")
    await replica.start()
    own = {"grpc_address": replica.address, "auth_token_file": token_file if has_token else None}
    settings = Settings()
    reward = RewardClient(settings.model_copy(update={"reward": settings.reward.model_copy(update=own)}))
    assert len(await reward.score(ITEMS)) == 1
    await reward.close()
    await replica.stop()
    assert asked == []


async def test_http_calls_go_past_it(server: FailingServer, asked: list[Any]) -> None:
    async with RetrieverClient(server.address, 60.0) as retriever:
        await retriever.search(["a"])
    client = BlockingClient(f"http://{server.address}", 2**20)
    assert (await asyncio.to_thread(client.request, "POST", "embed", {}, 60.0)).status == 200
    assert asked == []


def test_questions_of_readiness_go_past_it(asked: list[Any]) -> None:
    health = Health()
    health.mark_started()
    serving = serve_health("127.0.0.1:0", health)
    assert ask_service(f"http://127.0.0.1:{serving.server_address[1]}/readyz", TlsSettings()).is_ready
    serving.shutdown()
    serving.server_close()
    assert asked == []


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_traces_go_past_it(asked: list[Any], monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with (receive_grpc if protocol == "grpc" else receive_http)() as receiver:
        own = ["tracing.enabled=true", f"tracing.endpoint={receiver.endpoint}", f"tracing.protocol={protocol}"]
        tracing.start(load_settings(overrides=own, environ={}), "test")
        with tracing.span("work"):
            pass
        receiver.wait_for(lambda received: received.named("work"))
        tracing.stop()
    assert asked == []
