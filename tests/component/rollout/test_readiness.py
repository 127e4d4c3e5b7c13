"""What the rollout service says about a retriever: not there, not trusted, not willing, not ready."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from certificates import Issuer
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from waiting import WAIT_S

from forage_rollout.deployments import readiness
from forage_rollout.deployments.readiness import _open_client, _probe_retriever
from forage_rollout.serve.backend import ServiceState
from forage_rollout.serve.http_api import WIRE, make_app
from forage_runtime.addresses import listen
from forage_runtime.security.http.guard import RequestGuard
from forage_runtime.security.http.server import make_protocol
from forage_runtime.security.tls import make_client_context
from forage_runtime.security.token_file import TokenFile
from forage_runtime.settings import Settings, TlsSettings

OFF = TlsSettings()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow retriever is no absent one."""
    monkeypatch.setattr(readiness, "_PROBE_TIMEOUT_S", WAIT_S)


@contextlib.asynccontextmanager
async def serving(app: Any, tls: TlsSettings) -> AsyncIterator[str]:
    config = uvicorn.Config(app, http=make_protocol(tls, WIRE), log_config=None, lifespan="off")
    server, listening = uvicorn.Server(config), listen("127.0.0.1:0")
    server.capture_signals = contextlib.nullcontext
    running = asyncio.create_task(server.serve([listening]))
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await running


def make_retriever(tokens: Path | None) -> FastAPI:
    """A retriever as others write them: one route for searches, and probes."""
    app = FastAPI()
    app.add_api_route("/readyz", lambda: {"ready": True})
    app.add_api_route("/retrieve", lambda: {"result": []}, methods=["POST"])
    accepted = None if tokens is None else TokenFile(tokens)
    refuse = lambda status, sentence, _, headers: JSONResponse({"detail": sentence}, status, headers)  # noqa: E731
    app.add_middleware(RequestGuard, wire="retriever/http", refuse=refuse, tokens=accepted)
    return app


async def probe(address: str, tls: TlsSettings, token: Path | None = None) -> str:
    settings = Settings(tls=tls, retriever={"http_address": address, "auth_token_file": token})
    async with _open_client(settings) as client:
        return await _probe_retriever(client, settings)


async def test_a_retriever_that_refuses_this_service_is_not_ready_for_it(issuer: Issuer, tmp_path: Path) -> None:
    (tmp_path / "right").write_text("secret")
    (tmp_path / "wrong").write_text("guess")
    tls = TlsSettings(**issuer.make_settings(issuer.issue("retriever")))
    async with serving(make_retriever(tmp_path / "right"), tls) as address:
        assert await probe(address, TlsSettings(ca=issuer.ca), tmp_path / "right") == ""
        refused = await probe(address, TlsSettings(ca=issuer.ca), tmp_path / "wrong")
        assert "refuses this service" in refused
        assert refused.endswith("look at retriever.auth_token_file")
        assert "cannot be read" in await probe(address, TlsSettings(ca=issuer.ca), tmp_path / "none")
        assert "this port speaks TLS" in await probe(address, OFF, tmp_path / "right")
    assert "no answer" in await probe(address, OFF)


async def test_what_a_retriever_waits_for_is_a_clause() -> None:
    app = FastAPI()
    body = {"ready": False, "waiting_for": {"start": "reading the index", "memory": "2 GiB are missing"}}
    app.add_api_route("/readyz", lambda: JSONResponse(body, 503))
    async with serving(app, OFF) as address:
        expected = f"{address} is not ready: reading the index; memory: 2 GiB are missing"
        assert await probe(address, OFF) == expected


async def test_a_retriever_of_another_authority_is_named(issuer: Issuer, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    tls = TlsSettings(**issuer.make_settings(issuer.issue("retriever")))
    async with serving(make_retriever(None), tls) as address:
        said = await probe(address, TlsSettings(ca=Issuer(tmp_path / "other").ca))
    assert "an authority that tls.ca does not hold" in said
    async with serving(make_retriever(None), OFF) as address:
        assert await probe(address, OFF) == ""
        assert "answers in plain text" in await probe(address, tls)


async def test_the_openai_api_needs_a_client_certificate_where_one_is_required(issuer: Issuer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    tls = TlsSettings(**issuer.make_settings(issuer.issue("rollout"), require_client_cert=True))
    state: Any = ServiceState.__new__(ServiceState)
    app = make_app(None, state, Settings(), TokenFile(tmp_path / "token"), needs_certificate=True)
    async with serving(app, tls) as address:
        statuses = []
        for given in (TlsSettings(ca=issuer.ca), tls):
            async with httpx.AsyncClient(base_url=f"https://{address}", verify=make_client_context(given)) as client:
                reply = await client.post("/v1/ask", json={"question": "?"}, headers={"authorization": "Bearer no"})
                statuses.append((reply.status_code, reply.json()["error"]["type"]))
    assert statuses == [(403, "no_certificate"), (401, "unauthenticated")]
