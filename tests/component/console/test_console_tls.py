"""The console within TLS: what browsers and machines need, and runs whose services speak TLS."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import yaml
from certificates import Issuer
from run_folders import write_run
from upath import UPath
from waiting import WAIT_S, wait_until

from forage_console.live.health import inspect
from forage_runtime.clients.health import ask_service, list_health_urls
from forage_runtime.security.health_gate import HealthGate
from forage_runtime.security.tls import make_client_context
from forage_runtime.settings import Settings, TlsSettings
from forage_runtime.telemetry.health import Health, serve_health


def test_people_sign_in_with_the_token_and_machines_show_a_certificate(
    start_service: Callable[..., subprocess.Popen[str]],
    free_address: Callable[[], str],
    issuer: Issuer,
    tmp_path: Path,
) -> None:
    (tmp_path / "runs/one").mkdir(parents=True)
    write_run(tmp_path / "runs/one", {}, [{"step": 1}])
    (tmp_path / "token").write_text("new-secret\nold-secret\n")
    settings = Settings(
        run={"dir": tmp_path / "runs"},
        console={"http_address": free_address(), "auth_token_file": tmp_path / "token"},
        tls=issuer.make_settings(issuer.issue("console"), require_client_cert=True),
    )
    (tmp_path / "settings.yaml").write_text(settings.to_yaml())
    process = start_service("console", "--config", str(tmp_path / "settings.yaml"))
    url = list_health_urls(settings)["console"]
    wait_until(lambda: process.poll() is not None or ask_service(url, settings.tls).is_ready)
    home = f"https://{settings.console.http_address}"
    browser = httpx.Client(base_url=home, verify=make_client_context(TlsSettings(ca=issuer.ca)), timeout=WAIT_S)
    machine = httpx.Client(base_url=home, verify=make_client_context(settings.tls), timeout=WAIT_S)
    with browser, machine:
        assert [browser.get(path).status_code for path in ("/healthz", "/readyz")] == [200, 200]
        assert [browser.get(path).status_code for path in ("/metrics", "/waitz")] == [403, 403]
        assert [machine.get(path).status_code for path in ("/metrics", "/waitz", "/api/runs")] == [200, 200, 401]
        assert browser.get("/api/runs").status_code == 401
        assert browser.post("/login", data={"token": "guess"}).status_code == 401
        signed_in = browser.post("/login", data={"token": "old-secret"})
        assert (signed_in.status_code, "secure" in signed_in.headers["set-cookie"].lower()) == (303, True)
        assert browser.get("/api/runs").status_code == 200
        with browser.stream("GET", "/api/runs/one/events") as events:
            assert next(events.iter_lines())
        (tmp_path / "token").write_text("new-secret\n")
        assert browser.get("/api/runs").status_code == 401
    process.terminate()
    assert process.wait(WAIT_S) == 0


def test_a_run_whose_services_speak_tls_is_asked_with_its_certificates(
    issuer: Issuer, free_address: Callable[[], str], tmp_path: Path
) -> None:
    tls = issuer.make_settings(issuer.issue("reward"), require_client_cert=True)
    run, addresses = tmp_path / "runs/one", [free_address() for _ in range(8)]
    run.mkdir(parents=True)
    tree = {
        "run": {"id": "one", "dir": str(tmp_path / "runs")},
        "redis": {"url": f"redis://{addresses[0]}/0"},
        "reward": {"grpc_address": addresses[1], "health_address": addresses[2]},
        "retriever": {"http_address": addresses[3]},
        "rollout": {"grpc_address": addresses[4], "health_address": addresses[5]},
        "trainer": {"health_address": addresses[6]},
        "console": {"http_address": addresses[7]},
    }
    (run / "metrics.jsonl").write_text("")
    (run / "processes.json").write_text(json.dumps({"supervisor": {"pid": os.getpid()}, "services": []}))
    health = Health()
    health.mark_started()
    server = serve_health(addresses[2], health, gate=HealthGate(TlsSettings(**tls), "reward"))
    try:
        states = []
        for given in (tls, {}):
            (run / "settings.yaml").write_text(yaml.safe_dump(tree | {"tls": given}))
            rows = {row.name: row for row in inspect(UPath(run), Settings()).services}
            states.append((rows["reward"].state, rows["reward"].notes))
    finally:
        server.shutdown()
        server.server_close()
    assert states[0] == ("ready", [])
    assert states[1][0] == "silent"
    assert "this port speaks TLS" in states[1][1][0]
