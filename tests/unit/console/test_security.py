"""What the console answers to whom: hosts, origins, tokens, sizes, headers, files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx  # lint: socket because it calls the application in this process
import pytest
from console_client import copy_app
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from loop_clock import LoopClock
from upath import UPath

from forage_console import app as site
from forage_console.context import Console
from forage_console.pages import add_pages
from forage_console.security import guard
from forage_console.security.access import FREE_TRIES, MAX_PAUSE_S, SESSION_S, Access, TooManyTriesError, check_exposure
from forage_console.security.guard import COOKIE, MAX_BODY_BYTES, MAX_STREAMS, MAX_URL_BYTES, Guard
from forage_runtime.errors import SettingsError
from forage_runtime.settings import ConsoleSettings, Settings
from forage_runtime.telemetry.health import Health

TOKEN = "a-token-of-the-test"
JSON = {"Content-Type": "application/json"}
HOME = "http://127.0.0.1:18650"


@pytest.fixture(autouse=True)
def quick_app(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "make_app", copy_app)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    (folder / "one").mkdir(parents=True)
    (folder / "one/settings.yaml").write_text("{}")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/settings.yaml").write_text("password: hunter2")
    (folder / "link").symlink_to(tmp_path / "secret")
    return folder


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    return file


def open_site(runs: Path, base_url: str = HOME, **settings: Any) -> httpx.AsyncClient:
    """A client of the whole application, from this machine."""
    console = Console(UPath(runs), Settings(console=ConsoleSettings(**settings)))
    return open_app(site.make_site(console, Health()), base_url)


def open_app(app: Any, base_url: str = HOME) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=("127.0.0.1", 5))
    return httpx.AsyncClient(transport=transport, base_url=base_url)


def call(client: httpx.AsyncClient, method: str, path: str, **options: Any) -> httpx.Response:
    return asyncio.run(client.request(method, path, **options))


@pytest.mark.parametrize("is_started", [True, False])
def test_a_stream_that_the_browser_closed_is_no_failure(
    runs: Path, capfd: pytest.CaptureFixture[str], is_started: bool
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if is_started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        raise ExceptionGroup("as a group of tasks raises it", [anyio.BrokenResourceError()])

    reply = call(open_app(Guard(app, Settings(), Access(None))), "GET", "/api/events")
    out, err = capfd.readouterr()
    assert (reply.status_code, "request_failed" in out + err) == ((200, False) if is_started else (500, True))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.8.9.10:1", "localhost:1"])
def test_addresses_of_this_machine_need_no_token(address: str) -> None:
    check_exposure(ConsoleSettings(http_address=address))


@pytest.mark.parametrize("address", ["0.0.0.0:1", "10.0.0.7:1", "console:1", "128.0.0.1:1"])
def test_other_addresses_need_a_token(address: str, token_file: Path) -> None:
    with pytest.raises(SettingsError, match=r"console\.auth_token_file is not set: give it a file with a token"):
        check_exposure(ConsoleSettings(http_address=address))
    check_exposure(ConsoleSettings(http_address=address, auth_token_file=token_file))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:18650", "[::1]:9", "LOCALHOST:1", "lab.example:443"])
def test_the_names_of_this_machine_and_of_the_setting_are_served(runs: Path, host: str) -> None:
    client = open_site(runs, hosts=("lab.example",))
    assert call(client, "GET", "/api/openapi.json", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:18650", "", "[::2]"]
)
def test_a_name_that_was_rebound_to_this_machine_is_refused(runs: Path, host: str) -> None:
    reply = call(open_site(runs), "GET", "/api/runs", headers={"Host": host})
    assert reply.status_code == 403
    assert "console.hosts" in reply.json()["detail"]


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1.evil.example:18650", "https://", "http://["]
)
def test_what_pages_of_other_sites_send_is_refused(runs: Path, origin: str) -> None:
    for method, path in (("PUT", "/api/runs/one/notes"), ("POST", "/api/runs/one/ask"), ("POST", "/login")):
        reply = call(open_site(runs), method, path, headers={"Origin": origin}, json={"note": "mine", "tags": []})
        assert reply.status_code == 403, path
        assert "another site" in reply.json()["detail"]
    assert not (runs / "one/notes.json").exists()


def test_a_browser_that_hides_the_origin_is_refused_by_what_it_says_of_the_site(runs: Path) -> None:
    headers = {"Sec-Fetch-Site": "cross-site"}
    assert call(open_site(runs), "PUT", "/api/runs/one/notes", headers=headers, json={}).status_code == 403


def test_no_other_site_may_read_answers(runs: Path) -> None:
    for method in ("GET", "OPTIONS"):
        headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "PUT"}
        reply = call(open_site(runs), method, "/api/openapi.json", headers=headers)
        assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize("path", ["/", "/healthz", "/api/openapi.json", "/api/nothing", "/login", "/assets/x.js"])
def test_every_answer_keeps_the_browser_to_the_consoles_own_files(runs: Path, token_file: Path, path: str) -> None:
    for settings in ({}, {"auth_token_file": token_file}):
        headers = call(open_site(runs, **settings), "GET", path).headers
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["script-src"] == policy["default-src"] == policy["connect-src"] == "'self'"
        assert policy["object-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"


def test_a_failure_shows_no_stack(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    app = FastAPI()

    @app.get("/api/broken")
    def fail() -> None:
        raise RuntimeError("the secret of the stack")

    site.add_problems(app)
    reply = call(open_app(Guard(app, Settings(), Access(None))), "GET", "/api/broken")
    assert (reply.status_code, reply.json()) == (500, {"detail": "the console failed to answer: its log says why"})
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert "the secret of the stack" in "".join(capfd.readouterr())


@pytest.mark.parametrize("path", ["/api/runs", "/api/openapi.json", "/", "/runs/one", "/assets/index.js", "/nowhere"])
def test_with_a_token_nothing_is_shown_without_it(runs: Path, token_file: Path, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Cookie": f"{COOKIE}={TOKEN}"}):
        reply = call(open_site(runs, auth_token_file=token_file), "GET", path, headers=headers)
        assert reply.status_code == 401
        assert "sign in at /login" in reply.json()["detail"]


def test_a_bearer_token_admits(runs: Path, token_file: Path) -> None:
    headers = {"Authorization": f"bearer {TOKEN}"}
    reply = call(open_site(runs, auth_token_file=token_file), "GET", "/api/openapi.json", headers=headers)
    assert reply.status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/waitz", "/metrics"])
def test_probes_need_neither_token_nor_name(runs: Path, token_file: Path, path: str) -> None:
    client = open_site(runs, auth_token_file=token_file)
    reply = call(client, "GET", path, headers={"Host": "10.1.2.3:18650"})
    assert reply.status_code == (503 if path == "/readyz" else 200)
    assert str(runs) not in reply.text


def test_signing_in_gives_a_cookie_that_scripts_and_other_sites_do_not_have(runs: Path, token_file: Path) -> None:
    client = open_site(runs, auth_token_file=token_file)
    asked = call(client, "GET", "/runs/one?tab=a&b=%2F", headers={"Accept": "text/html"})
    assert asked.status_code == 303
    login = asked.headers["location"]
    assert "<script" not in call(client, "GET", login).text
    assert call(client, "POST", login, data={"token": "wrong"}).status_code == 401
    reply = call(client, "POST", login, data={"token": TOKEN}, headers={"Origin": HOME})
    assert (reply.status_code, reply.headers["location"]) == (303, "/runs/one?tab=a&b=%2F")
    cookie = reply.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    assert call(client, "GET", "/api/openapi.json").status_code == 200
    assert call(client, "POST", "/logout").status_code == 303
    assert call(client, "GET", "/api/openapi.json").status_code == 401


def test_a_cookie_over_https_is_never_sent_in_the_clear(runs: Path, token_file: Path) -> None:
    client = open_site(runs, auth_token_file=token_file, hosts=("lab.example",))
    headers = {"Host": "lab.example", "Origin": "https://lab.example"}
    assert "Secure" in call(client, "POST", "/login", data={"token": TOKEN}, headers=headers).headers["set-cookie"]


@pytest.mark.parametrize(
    "wanted", ["//evil.example", "https://evil.example", "/\\evil.example", "\r\nx: y", "", "/\tx"]
)
def test_signing_in_leads_to_no_other_site(runs: Path, token_file: Path, wanted: str) -> None:
    client = open_site(runs, auth_token_file=token_file)
    reply = call(client, "POST", "/login", params={"next": wanted}, data={"token": TOKEN})
    assert (reply.status_code, reply.headers["location"]) == (303, "/")


def test_what_comes_next_is_text_in_the_form(runs: Path, token_file: Path) -> None:
    client = open_site(runs, auth_token_file=token_file)
    text = call(client, "GET", "/login", params={"next": '/"><script>alert(1)</script>'}).text
    assert "<script>" not in text


def test_wrong_tokens_make_a_client_wait_longer_and_longer_and_no_other(token_file: Path) -> None:
    now = [1000.0]
    access = Access(token_file, lambda: now[0])
    for _ in range(FREE_TRIES):
        assert not access.admits_token("wrong", "10.0.0.1")
    pauses = []
    for _ in range(10):
        with pytest.raises(TooManyTriesError) as caught:
            access.admits_token(TOKEN, "10.0.0.1")  # the right one, too: it could be found by trying
        pauses.append(caught.value.wait_s)
        now[0] += caught.value.wait_s
        assert not access.admits_token("wrong", "10.0.0.1")
    assert pauses[:3] == [1.0, 2.0, 4.0]
    assert pauses[-1] == MAX_PAUSE_S
    assert access.admits_token(TOKEN, "10.0.0.2")
    now[0] += MAX_PAUSE_S
    assert access.admits_token(TOKEN, "10.0.0.1")
    assert not access.admits_token("wrong", "10.0.0.1")  # it begins anew


def test_tries_over_http_end_with_429(runs: Path, token_file: Path) -> None:
    client = open_site(runs, auth_token_file=token_file)
    replies = [call(client, "POST", "/login", data={"token": "wrong"}) for _ in range(FREE_TRIES + 1)]
    assert [reply.status_code for reply in replies] == [401] * FREE_TRIES + [429]
    assert int(replies[-1].headers["retry-after"]) >= 1
    bearer = call(client, "GET", "/api/runs", headers={"Authorization": f"Bearer {TOKEN}"})
    assert (bearer.status_code, "too many wrong tokens" in bearer.json()["detail"]) == (429, True)


def test_clients_that_try_do_not_fill_the_memory(token_file: Path) -> None:
    access = Access(token_file)
    for number in range(3000):
        access.admits_token("wrong", f"10.0.{number // 256}.{number % 256}")
    assert len(access._tries) <= 1000


def test_a_session_ends_after_a_week_and_cannot_be_prolonged(token_file: Path) -> None:
    now = [1000.0]
    access = Access(token_file, lambda: now[0])
    session = access.make_session(TOKEN)
    end, _, proof = session.partition(".")
    for wrong in (
        f"{int(end) + 1}.{proof}",
        f"{end}.",
        end,
        "",
        "x.y",
        f"²{end}.{proof}",
        "9" * 400 + ".x",
        f"{end}.é",
    ):
        assert not access.admits_session(wrong)
    now[0] += SESSION_S - 1
    assert access.admits_session(session)
    now[0] += 2
    assert not access.admits_session(session)


def test_another_token_in_the_file_ends_all_sessions(token_file: Path) -> None:
    access = Access(token_file)
    session = access.make_session(TOKEN)
    token_file.write_text("")  # not a token: the old one stays
    assert access.admits_token(TOKEN, "a")
    fresh = token_file.with_name("fresh")
    fresh.write_text("another-token")
    fresh.replace(token_file)
    assert not access.admits_session(session)
    assert access.admits_token("another-token", "a")


def test_of_several_tokens_each_signs_in_and_ends_its_own_sessions_when_it_goes(token_file: Path) -> None:
    token_file.write_text(f"new-token\n{TOKEN}\n")
    access = Access(token_file)
    assert access.admits_token(TOKEN, "a")
    assert access.admits_token("new-token", "a")
    old, new = access.make_session(TOKEN), access.make_session("new-token")
    assert access.admits_session(old)
    assert access.admits_session(new)
    token_file.write_text("new-token\n")
    assert access.admits_session(new)
    assert not access.admits_session(old)
    assert not access.admits_token(TOKEN, "a")


@pytest.mark.parametrize(
    ("home", "secure", "pinned"),
    [
        ("http://127.0.0.1:18650", False, False),
        ("https://127.0.0.1:18650", True, False),
        ("https://localhost:18650", True, False),  # a browser would refuse plain text on its other ports as well
        ("https://forage.example", True, True),
    ],
)
def test_cookies_and_hosts_stay_with_tls(runs: Path, token_file: Path, home: str, secure: bool, pinned: bool) -> None:
    client = open_site(runs, home, auth_token_file=token_file, hosts=["forage.example"])
    reply = call(client, "POST", "/login", content=f"token={TOKEN}")
    assert reply.status_code == 303
    assert ("secure" in reply.headers["set-cookie"].lower()) is secure
    assert ("strict-transport-security" in reply.headers) is pinned


def test_sizes_have_limits(runs: Path) -> None:
    client = open_site(runs)
    assert call(client, "GET", "/api/runs", params={"x": "y" * MAX_URL_BYTES}).status_code == 414
    announced = call(client, "PUT", "/api/runs/one/notes", content=b"x" * (MAX_BODY_BYTES + 1))
    assert announced.status_code == 413

    async def stream() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 1024 + 1):
            yield b"x" * 1024

    headers = {"Content-Type": "application/json"}
    unannounced = call(client, "PUT", "/api/runs/one/notes", content=stream(), headers=headers)
    assert unannounced.status_code == 413
    assert "send less" in unannounced.json()["detail"]


def test_open_streams_have_a_limit_and_closed_ones_do_not_count() -> None:
    closing = asyncio.Event()
    app = FastAPI()

    @app.get("/api/events")
    async def follow() -> StreamingResponse:
        async def wait() -> AsyncIterator[bytes]:
            await closing.wait()
            yield b"data: 1\n\n"

        return StreamingResponse(wait(), media_type="text/event-stream")

    client = open_app(Guard(app, Settings(), Access(None)))

    async def run() -> None:
        streams = [asyncio.create_task(client.get("/api/events")) for _ in range(MAX_STREAMS)]
        while guard.STREAMS._value.get() < MAX_STREAMS:
            await asyncio.sleep(0)
        refused = await client.get("/api/events")
        assert refused.status_code == 503
        assert "close some" in refused.json()["detail"]
        closing.set()
        assert {reply.status_code for reply in await asyncio.gather(*streams)} == {200}
        assert (await client.get("/api/events")).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/%2e%2e/health",
        "/api/runs/%2e%2e%2fsecret/health",
        "/api/runs/..%5Csecret/health",
        "/api/runs/link/health",
        "/api/runs/one%00/health",
        "/api/runs/%2Fetc/health",
        "/api/runs/./health",
        "/api/runs/one/../../secret/health",
        "/assets/%2e%2e/%2e%2e/serve.py",
        "/assets/..%2f..%2fserve.py",
        "/assets/%00",
        "/static/index.html",
        "/serve.py",
    ],
)
def test_no_path_leads_out_of_the_folders(runs: Path, path: str) -> None:
    reply = call(open_site(runs), "GET", path)
    assert reply.status_code in (404, 503), reply.text
    assert "hunter2" not in reply.text


def test_built_files_are_kept_for_ever_and_the_page_is_asked_for_again(tmp_path: Path) -> None:
    folder = tmp_path / "static"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html>the page")
    (folder / "assets/index-1a2b.js").write_text("console.log(1)")
    (folder / "favicon.svg").write_text("<svg/>")
    (tmp_path / "secret.js").write_text("hunter2")
    (folder / "assets/link.js").symlink_to(tmp_path / "secret.js")
    app = FastAPI()
    add_pages(app, folder)
    site.add_problems(app)
    client = open_app(Guard(app, Settings(), Access(None)))
    for path in ("/", "/compare?a=x&b=y", "/runs/one", "/runs/one/groups/step-1/a%2Fb"):
        page = call(client, "GET", path)
        assert (page.status_code, page.text) == (200, "<!doctype html>the page")
        assert page.headers["cache-control"] == "no-cache"
    script = call(client, "GET", "/assets/index-1a2b.js")
    assert script.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert script.headers["content-type"].startswith(("text/javascript", "application/javascript"))
    assert call(client, "HEAD", "/favicon.svg").headers["content-type"] == "image/svg+xml"
    for path in ("/api/nothing", "/assets/nothing.js", "/assets/link.js", "/nowhere", "/index.html/x"):
        reply = call(client, "GET", path)
        assert (reply.status_code, list(reply.json())) == (404, ["detail"]), path


def test_answers_are_compressed_and_streams_are_not(runs: Path) -> None:
    reply = call(open_site(runs), "GET", "/api/openapi.json", headers={"Accept-Encoding": "gzip"})
    assert reply.headers["content-encoding"] == "gzip"
    assert json.loads(reply.content)["info"]["title"] == "Forage console"


def test_a_wrong_parameter_is_one_sentence_with_field_and_value(runs: Path) -> None:
    reply = call(open_site(runs), "GET", "/api/runs/one/curves", params={"after": "-3"})
    assert reply.status_code == 422
    assert reply.json() == {"detail": "after: input should be greater than or equal to 0, not '-3'"}
    reply = call(
        open_site(runs), "PUT", "/api/runs/one/notes", content="{", headers={"Content-Type": "application/json"}
    )
    assert reply.json()["detail"].startswith("the body is not JSON: ")
    reply = call(open_site(runs), "PUT", "/api/runs/one/notes", content=b"\xff{", headers=JSON)
    assert (reply.status_code, reply.json()["detail"]) == (422, "the body is not JSON: it is not UTF-8")


def test_a_body_that_does_not_come_ends_and_probes_pass_a_full_console(
    runs: Path, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "BODY_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(guard, "MAX_REQUESTS", 2)

    async def never() -> AsyncIterator[bytes]:
        yield b"token="
        begun.append(True)
        await asyncio.Event().wait()

    begun: list[bool] = []

    async def ask() -> tuple[list[int], int, int]:
        clock = LoopClock()
        async with open_site(runs, auth_token_file=token_file) as client:
            slow = [asyncio.create_task(client.post("/login", content=never())) for _ in range(2)]
            while len(begun) < 2:
                await asyncio.sleep(0)
            probe, page = await client.get("/healthz"), await client.get("/login")
            clock.skip(3600)
            return [reply.status_code for reply in await asyncio.gather(*slow)], probe.status_code, page.status_code

    assert asyncio.run(ask()) == ([408, 408], 200, 503)
    assert call(open_site(runs, auth_token_file=token_file), "GET", "/login").status_code == 200
