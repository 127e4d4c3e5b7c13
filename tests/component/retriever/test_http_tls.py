"""The retriever's HTTP API on a real server within TLS and with tokens, and the client of the other services."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from certificates import Issuer
from few_attempts import few_attempts
from prometheus_client import REGISTRY
from retriever_parts import LONG_S, open_retrieval
from waiting import wait_until_async

from forage_retriever.index.load import Index
from forage_retriever.serve.http_api import WIRE, make_app
from forage_runtime.addresses import listen
from forage_runtime.clients.calls import RefusedError
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.errors import ForageError, UnavailableError
from forage_runtime.security.http import server
from forage_runtime.security.http.server import make_protocol
from forage_runtime.security.refusals import Refusal
from forage_runtime.security.tls import make_client_context
from forage_runtime.security.token_file import TokenFile
from forage_runtime.settings import Settings, TlsSettings
from forage_runtime.telemetry.health import Health

__all__ = ["few_attempts"]

OFF = TlsSettings()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    file.write_text("first\n")
    return file


def make_tls(issuer: Issuer, name: str = "retriever", **options: Any) -> TlsSettings:
    return TlsSettings(**issuer.make_settings(issuer.issue(name), **options))


@contextlib.asynccontextmanager
async def serving(index: Index, tls: TlsSettings, tokens: Path | None = None) -> AsyncIterator[str]:
    """A retriever on a port; yields its address."""
    health = Health()
    health.mark_started()
    accepted = None if tokens is None else TokenFile(tokens, "retriever.auth_token_file")
    async with open_retrieval(index) as core:
        app = make_app(core, health, None, accepted, needs_certificate=tls.require_client_cert)
        options = {"log_config": None, "lifespan": "off", "timeout_graceful_shutdown": 2}
        server = uvicorn.Server(uvicorn.Config(app, http=make_protocol(tls, WIRE), **options))
        server.capture_signals = contextlib.nullcontext
        listening = listen("127.0.0.1:0")
        running = asyncio.create_task(server.serve([listening]))
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running


async def search(address: str, tls: TlsSettings, token: Path | None = None, timeout_s: float = LONG_S) -> int:
    """Search as the rollout service does; returns the number of documents."""
    tokens = None if token is None else TokenFile(token)
    async with RetrieverClient(address, timeout_s, tls=tls, tokens=tokens) as client:
        return len((await client.search(["city of Norway"])).documents[0])


def count(reason: Refusal) -> float:
    labels = {"wire": WIRE, "reason": reason}
    return REGISTRY.get_sample_value("forage_common_refused_callers_total", labels) or 0.0


async def test_searches_go_through_tls(loaded: Index, issuer: Issuer) -> None:
    async with serving(loaded, make_tls(issuer)) as address:
        assert await search(address, TlsSettings(ca=issuer.ca)) > 0


@pytest.mark.parametrize(
    ("path", "with_token", "with_certificate"),
    [
        ("/healthz", 200, 200),
        ("/readyz", 200, 200),
        ("/health", 200, 200),
        ("/metrics", 403, 200),
        ("/waitz", 403, 200),
        ("/openapi.json", 403, 401),
        ("/retrieve", 403, 401),
        ("/queries", 403, 401),
        ("/access", 403, 401),
        ("/reload", 403, 401),
        ("/nothing", 403, 401),
        ("//healthz", 403, 401),
        ("/healthz/", 403, 401),
        ("/%68ealthz", 200, 200),
    ],
)
async def test_each_route_needs_its_own_of_certificate_and_token(
    loaded: Index, issuer: Issuer, token_file: Path, path: str, with_token: int, with_certificate: int
) -> None:
    method = "POST" if path in ("/retrieve", "/queries", "/access", "/reload") else "GET"
    bearer = {"authorization": "Bearer first"}
    async with serving(loaded, make_tls(issuer, require_client_cert=True), token_file) as address:
        async with httpx.AsyncClient(verify=make_client_context(TlsSettings(ca=issuer.ca))) as stranger:
            reply = await stranger.request(method, f"https://{address}{path}", headers=bearer)
            assert reply.status_code == with_token
        async with httpx.AsyncClient(verify=make_client_context(make_tls(issuer, "prometheus"))) as known:
            reply = await known.request(method, f"https://{address}{path}")
            assert reply.status_code == with_certificate
            both = await known.request(method, f"https://{address}{path}", headers=bearer)
            assert both.status_code not in (401, 403)


async def test_without_the_right_token_a_search_is_refused_before_its_body_is_read(
    loaded: Index, token_file: Path, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("guess")
    before = {reason: count(reason) for reason in Refusal}
    async with serving(loaded, OFF, token_file) as address:
        assert await search(address, OFF, token_file) > 0
        with pytest.raises(RefusedError, match=r"\(401\).*look at retriever.auth_token_file"):
            await search(address, OFF)
        with pytest.raises(RefusedError, match=r"\(401\)"):
            await search(address, OFF, wrong)
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")  # and no body
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
    assert b" 401 " in head
    assert b"www-authenticate: Bearer" in head
    assert count(Refusal.NO_TOKEN) - before[Refusal.NO_TOKEN] == 2
    assert count(Refusal.WRONG_TOKEN) - before[Refusal.WRONG_TOKEN] == 1


@pytest.mark.usefixtures("few_attempts")
@pytest.mark.parametrize("defect", ["expired", "early", "foreign", "elsewhere"])
async def test_a_client_trusts_no_wrong_service(loaded: Index, issuer: Issuer, other: Issuer, defect: str) -> None:
    issued, sentence = {
        "expired": (issuer.issue_expired("a"), "certificate has expired"),
        "early": (issuer.issue_early("b"), "not valid yet"),
        "foreign": (other.issue("c"), "an authority that tls.ca does not hold"),
        "elsewhere": (issuer.issue("d", hosts=["retriever.example"]), "is not for this address"),
    }[defect]
    async with serving(loaded, TlsSettings(ca=issuer.ca, cert=issued.cert, key=issued.key)) as address:
        with pytest.raises(UnavailableError, match=sentence):
            await search(address, TlsSettings(ca=issuer.ca))


@pytest.mark.usefixtures("few_attempts")
@pytest.mark.parametrize("defect", ["expired", "foreign"])
async def test_a_service_trusts_no_wrong_client(loaded: Index, issuer: Issuer, other: Issuer, defect: str) -> None:
    issued = issuer.issue_expired("client") if defect == "expired" else other.issue("client")
    before = count(Refusal.TLS_FAILED)
    async with serving(loaded, make_tls(issuer, require_client_cert=True)) as address:
        with pytest.raises(UnavailableError, match="this client's"):
            await search(address, TlsSettings(ca=issuer.ca, cert=issued.cert, key=issued.key))
        await wait_until_async(lambda: count(Refusal.TLS_FAILED) > before)


async def test_plain_text_on_the_port_is_answered_with_the_remedy(loaded: Index, issuer: Issuer) -> None:
    before = count(Refusal.TLS_FAILED)
    async with serving(loaded, make_tls(issuer)) as address:
        with pytest.raises(RefusedError, match=r"\(400\).*this port speaks TLS.*tls.ca"):
            await search(address, OFF)
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")  # not HTTP/1
        assert await reader.read() is not None
        writer.close()
    assert count(Refusal.TLS_FAILED) - before == 2


@pytest.mark.usefixtures("few_attempts")
async def test_tls_to_a_plain_port_is_explained(loaded: Index, issuer: Issuer) -> None:
    async with serving(loaded, OFF) as address:
        with pytest.raises(UnavailableError, match=r"answers in plain text: set tls\.ca"):
            await search(address, TlsSettings(ca=issuer.ca))


async def test_silent_clients_delay_nobody_and_are_let_go(
    loaded: Index, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_S", LONG_S)
    before = count(Refusal.TLS_FAILED)
    async with serving(loaded, make_tls(issuer)) as address:
        silent = [await asyncio.open_connection(*address.split(":")) for _ in range(50)]
        silent[0][1].write(b"\x16\x03\x01")  # the beginning of a handshake, and no more
        assert await search(address, TlsSettings(ca=issuer.ca)) > 0
        monkeypatch.setattr(server, "HANDSHAKE_S", 0.2)
        held = [await asyncio.open_connection(*address.split(":")) for _ in range(20)]
        held[0][1].write(b"\x16\x03\x01")
        for reader, writer in held:
            assert await reader.read() == b""
            writer.close()
        await wait_until_async(lambda: count(Refusal.TLS_FAILED) - before == 20)
        _, checking = await asyncio.open_connection(*address.split(":"))
        checking.close()  # as load balancers look whether a port is open
        monkeypatch.setattr(server, "HANDSHAKE_S", LONG_S)
        assert await search(address, TlsSettings(ca=issuer.ca)) > 0
        assert count(Refusal.TLS_FAILED) - before == 20
        for _, writer in silent:
            writer.close()


async def test_a_large_answer_and_a_request_sent_with_the_handshake_arrive_whole(loaded: Index, issuer: Issuer) -> None:
    async with serving(loaded, make_tls(issuer)) as address:
        context = make_client_context(TlsSettings(ca=issuer.ca))
        assert isinstance(context, ssl.SSLContext)
        async with httpx.AsyncClient(verify=context, base_url=f"https://{address}") as client:
            replies = await asyncio.gather(
                *(client.post("/retrieve", json={"queries": ["city of Norway"] * 1000}) for _ in range(20))
            )
        assert {len(reply.json()["result"]) for reply in replies} == {1000}


async def test_tokens_and_certificates_are_replaced_while_searches_run(
    loaded: Index, issuer: Issuer, other: Issuer, token_file: Path, tmp_path: Path
) -> None:
    ca, sent = tmp_path / "ca.pem", tmp_path / "sent"
    ca.write_bytes(issuer.ca.read_bytes())
    sent.write_text("first")
    served, shown = issuer.issue("retriever"), issuer.issue("rollout")
    server = TlsSettings(ca=ca, cert=served.cert, key=served.key, require_client_cert=True)
    client = TlsSettings(ca=ca, cert=shown.cert, key=shown.key)
    done, failed, stop = 0, [], asyncio.Event()

    async def keep_searching(address: str) -> None:
        nonlocal done
        while not stop.is_set():
            try:
                done += await search(address, client, sent) > 0
            except ForageError as error:
                failed.append(error)

    async def pause() -> None:
        target = done + 4
        await wait_until_async(lambda: done >= target or failed)

    async with serving(loaded, server, token_file) as address:
        searching = [asyncio.create_task(keep_searching(address)) for _ in range(2)]
        await pause()
        replace(token_file, b"second\nfirst\n")
        await pause()
        replace(sent, b"second")
        await pause()
        replace(token_file, b"second\n")
        await pause()
        replace(ca, issuer.ca.read_bytes() + other.ca.read_bytes())
        await pause()
        for issued in (served, shown):
            fresh = other.issue(issued.cert.stem)
            replace(issued.key, fresh.key.read_bytes())  # for a moment the two do not fit: the old ones stay
            await pause()
            replace(issued.cert, fresh.cert.read_bytes())
            await pause()
        replace(ca, other.ca.read_bytes())
        await pause()
        stop.set()
        await asyncio.gather(*searching)
        assert not failed
        with pytest.raises(UnavailableError):
            await search(address, make_tls(issuer, "old"), sent, timeout_s=0.6)


async def test_the_settings_lead_to_the_client(loaded: Index, issuer: Issuer, token_file: Path) -> None:
    tls = make_tls(issuer, require_client_cert=True)
    async with serving(loaded, tls, token_file) as address:
        settings = Settings(tls=tls, retriever={"http_address": address, "auth_token_file": token_file})
        async with RetrieverClient.from_settings(settings) as client:
            assert (await client.search(["city"])).documents[0]


def replace(file: Path, content: bytes) -> None:
    fresh = file.with_suffix(".fresh")
    fresh.write_bytes(content)
    fresh.replace(file)
