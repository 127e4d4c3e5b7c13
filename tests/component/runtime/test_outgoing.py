"""Calls that leave a service against a server that redirects, floods, drips and lies, on a real socket."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest
from few_attempts import few_attempts
from hostile_server import NONSENSE, OK, SLOW, TOO_LARGE, HostileServer, Serve, open_hostile_server, redirect_to, say

from forage_runtime.clients.calls import MalformedReplyError, RefusedError
from forage_runtime.clients.circuit import Circuit
from forage_runtime.clients.health import ask_service
from forage_runtime.clients.outgoing import BlockingClient, UnboundedReplyError, bound_replies
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.errors import UnavailableError
from forage_runtime.settings import TlsSettings

SECRET = "S3cr3t"
MOST = 2**20
LONG_S = 300.0
"""Limit of what must not end by its limit."""
__all__ = ["few_attempts"]


@pytest.fixture
def server() -> Iterator[HostileServer]:
    with open_hostile_server() as made:
        yield made


@pytest.fixture
def elsewhere() -> Iterator[HostileServer]:
    with open_hostile_server() as made:
        yield made


def measure_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def list_cases(cases: dict[str, Serve]) -> Any:
    return pytest.mark.parametrize("serve", cases.values(), ids=cases.keys())


@list_cases(TOO_LARGE)
def test_a_large_reply_is_cut_off(server: HostileServer, serve: Serve) -> None:
    server.serve = serve
    before = measure_memory()
    with pytest.raises(UnboundedReplyError, match=r"larger than 1048576 bytes|is compressed"):
        BlockingClient(f"http://{server.address}", MOST).request("GET", "x", None, LONG_S)
    assert measure_memory() - before < 32 * MOST


@list_cases(SLOW)
def test_a_slow_reply_ends_at_the_deadline(server: HostileServer, serve: Serve) -> None:
    server.serve = serve
    with pytest.raises(TimeoutError):
        BlockingClient(f"http://{server.address}", MOST).request("GET", "x", None, 0.3)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_an_answer_and_not_followed(server: HostileServer, elsewhere: HostileServer, status: int) -> None:
    server.serve = redirect_to(f"http://{elsewhere.address}/", status)
    client = BlockingClient(f"http://{server.address}", MOST, {"Authorization": f"Bearer {SECRET}"})
    assert client.request("POST", "x", {}, LONG_S).status == status
    assert SECRET.encode() in server.requests[0]
    assert elsewhere.requests == []


def test_neither_proxies_nor_credentials_of_the_environment_are_used(
    server: HostileServer, elsewhere: HostileServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://{elsewhere.address}")
    (tmp_path / "netrc").write_text(f"default login me password {SECRET}")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    BlockingClient(f"http://{server.address}", MOST).request("GET", "x", None, LONG_S)
    assert (len(server.requests), elsewhere.requests) == (1, [])
    assert b"uthorization" not in server.requests[0]
    assert b"ncoding: identity" in server.requests[0]


def test_calls_of_many_threads_share_a_client(server: HostileServer) -> None:
    from concurrent.futures import ThreadPoolExecutor

    client = BlockingClient(f"http://{server.address}", MOST)
    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda _: client.request("GET", "x", None, LONG_S).content, range(40)))
    assert replies == [b"{}"] * 40


@pytest.mark.usefixtures("few_attempts")
@list_cases({**TOO_LARGE, **NONSENSE})
async def test_the_retriever_client_is_not_deceived(
    server: HostileServer, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.serve = serve
    # The same with less to pour.
    monkeypatch.setattr("forage_runtime.clients.retriever.bound_replies", partial(bound_replies, MOST))
    async with RetrieverClient(server.address, LONG_S) as client:
        with pytest.raises((MalformedReplyError, UnavailableError)):
            await client.search(["x"])


async def test_the_retriever_client_follows_nobody(server: HostileServer, elsewhere: HostileServer) -> None:
    server.serve = redirect_to(f"http://{elsewhere.address}/?token={SECRET}")
    async with RetrieverClient(server.address, LONG_S) as client:
        with pytest.raises(RefusedError) as refused:
            await client.search(["x"])
    assert SECRET not in str(refused.value)
    assert elsewhere.requests == []


@list_cases({**TOO_LARGE, **NONSENSE, "a redirect": redirect_to("http://127.0.0.1:1/")})
def test_the_status_says_that_a_stranger_is_silent(server: HostileServer, serve: Serve) -> None:
    server.serve = serve
    assert ask_service(f"http://{server.address}/readyz", TlsSettings()).state == "silent"


def test_errors_and_metrics_name_an_address_without_its_credentials() -> None:
    assert Circuit("x", f"https://user:{SECRET}@host/v1").address == "https://***@host/v1"


async def test_a_reply_within_the_bound_is_whole(server: HostileServer) -> None:
    server.serve = say(OK + b"Content-Length: %d\r\n\r\n" % MOST + b"x" * MOST)
    assert len(BlockingClient(f"http://{server.address}", MOST).request("GET", "", None, LONG_S).content) == MOST
    async with httpx.AsyncClient(**bound_replies(MOST, {"X-More": "1"})) as client:
        assert len((await client.get(f"http://{server.address}/")).content) == MOST
    assert b"X-More: 1" in server.requests[-1]
