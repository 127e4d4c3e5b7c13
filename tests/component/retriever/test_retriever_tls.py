"""The retriever as a process with certificates and a token, as the settings give them."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from certificates import Issuer
from waiting import WAIT_S, wait_until

from forage_runtime.clients.calls import RefusedError
from forage_runtime.clients.health import ask_service, list_health_urls
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.security.tls import make_client_context
from forage_runtime.settings import Settings, TlsSettings

StartService = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def settings(tmp_path: Path, issuer: Issuer, free_address: Callable[[], str]) -> Settings:
    corpus, token = tmp_path / "corpus.jsonl", tmp_path / "token"
    corpus.write_text(json.dumps({"id": "1", "contents": '"Oslo"\nOslo is the capital of Norway.'}) + "\n")
    token.write_text("secret\n")
    retriever = {
        "mode": "bm25",
        "cache_dir": tmp_path / "cache",
        "http_address": free_address(),
        "grpc_address": free_address(),
        "auth_token_file": token,
    }
    tls = issuer.make_settings(issuer.issue("retriever"), require_client_cert=True)
    return Settings(retriever=retriever, tls=tls, data={"corpus": corpus})


def start(start_service: StartService, settings: Settings, tmp_path: Path) -> subprocess.Popen[str]:
    file = tmp_path / "settings.yaml"
    file.write_text(settings.to_yaml())
    return start_service("retriever", "--config", str(file))


def wait_until_ready(process: subprocess.Popen[str], settings: Settings) -> None:
    def is_ready() -> bool:
        assert process.poll() is None, process.communicate()[1]
        return ask_service(list_health_urls(settings)["retriever"], settings.tls).is_ready

    wait_until(is_ready)


def test_who_has_certificate_and_token_searches_and_others_do_not(
    start_service: StartService, settings: Settings, issuer: Issuer, tmp_path: Path
) -> None:
    process = start(start_service, settings, tmp_path)
    wait_until_ready(process, settings)

    async def search(given: Settings) -> int:
        async with RetrieverClient.from_settings(given, WAIT_S) as client:
            return len((await client.search(["Norway"])).documents[0])

    assert asyncio.run(search(settings)) == 1
    without_token = settings.model_copy(
        update={"retriever": settings.retriever.model_copy(update={"auth_token_file": None})}
    )
    with pytest.raises(RefusedError, match=r"\(401\)"):
        asyncio.run(search(without_token))
    without_certificate = settings.model_copy(update={"tls": TlsSettings(ca=issuer.ca)})
    with pytest.raises(RefusedError, match=r"\(403\).*client certificate"):
        asyncio.run(search(without_certificate))
    with httpx.Client(verify=make_client_context(settings.tls)) as client:
        page = client.get(f"https://{settings.retriever.http_address}/metrics").text
    for reason in ("no_token", "no_certificate"):
        assert f'forage_common_refused_callers_total{{reason="{reason}",wire="retriever/http"}} 1.0' in page
    process.send_signal(signal.SIGTERM)
    log = process.communicate(timeout=WAIT_S)[1]
    assert process.returncode == 0
    assert "caller_refused" in log
    assert "secret" not in log
