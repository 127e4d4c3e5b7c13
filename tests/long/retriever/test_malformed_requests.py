"""Thousands of malformed requests to a running service: refused, without a server error or a memory leak.

Three sources: schemathesis, from the service's own OpenAPI page; bytes written to its HTTP port; bytes sent as gRPC
messages. `FORAGE_FUZZ` multiplies how many.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import httpx
import hypothesis
import psutil
import pytest
import requests
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from forage_common.v1 import retriever_pb2, retriever_pb2_grpc

TIMES = float(os.environ.get("FORAGE_FUZZ", "1"))
PAGE_EXAMPLES, RAW_REQUESTS, GRPC_MESSAGES = (int(TIMES * count) for count in (600, 5_400, 4_000))
CONNECTIONS = 20
MAY_GROW_BYTES = 48 * 2**20
"""Growth of resident memory after a warm-up: what allocators keep, not a leak per request."""

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
ALLOWED = {200, 400, 404, 405, 408, 413, 422, 431, 503}


@dataclass(frozen=True)
class Service:
    process: subprocess.Popen[str]
    http: str
    grpc: str

    def read_memory(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def check(self) -> None:
        """Check that it still answers and has counted no internal error."""
        assert self.process.poll() is None
        reply = httpx.post(f"http://{self.http}/retrieve", json={"queries": ["Oslo"], "topk": 1}, timeout=30)
        assert [row["id"] for row in reply.raise_for_status().json()["result"][0]] == ["p1"]
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=20) as page:
            lines = page.read().decode().splitlines()
        counted = [line for line in lines if line.startswith("forage_retriever_requests_total{")]
        assert not [line for line in counted if 'code="5' in line and 'code="503"' not in line]
        assert not [line for line in counted if 'code="INTERNAL"' in line]
        assert not [
            line for line in lines if line.startswith("forage_retriever_search_failures_total ") and line[-3:] != "0.0"
        ]


@pytest.fixture(scope="module")
def service(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, free_address: Callable[[], str]
) -> Iterator[Service]:
    """One service for all tests, so that each also runs in the state that the others left."""
    folder = tmp_path_factory.mktemp("fuzz")
    titles = ["Norway", "Oslo", "Kandy", "São Paulo"]
    rows = [
        {"id": f"p{n}", "contents": f'"{title}"\n{title} is a place.', "lang": "nb"} for n, title in enumerate(titles)
    ]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    http, grpc_ = free_address(), free_address()
    log = (folder / "log").open("w+")
    process = subprocess.Popen(
        [
            str(repository / ".venvs/retriever/bin/python"),
            *("-m", "forage_retriever", f"data.corpus={folder / 'corpus.jsonl'}", "retriever.mode=bm25"),
            *(f"retriever.cache_dir={folder / 'cache'}", "retriever.filter_fields=[lang, url]"),
            *(f"retriever.http_address={http}", f"retriever.grpc_address={grpc_}"),
        ],
        stderr=log,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"http://{http}/readyz", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.05)
        yield Service(process, http, grpc_)
        log.seek(0)
        assert "_failed" not in log.read()  # the ending of unexpected events
    finally:
        process.kill()
        process.wait()
        log.close()


def test_requests_generated_from_the_openapi_page_are_answered_as_documented(service: Service) -> None:
    schema = schemathesis.openapi.from_url(f"http://{service.http}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    searches = [operation for operation in operations if operation.method.upper() == "POST" and operation.body]
    assert {operation.path for operation in searches} == {"/retrieve", "/queries", "/access"}
    session = requests.Session()

    def ask(operation: Any, mode: schemathesis.GenerationMode, examples: int) -> None:
        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate],
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def send_one(case: Any) -> None:
            case.call_and_validate(base_url=f"http://{service.http}", session=session, checks=CHECKS, timeout=30)

        send_one()

    for operation in operations:
        if operation in searches:
            for mode in schemathesis.GenerationMode:
                ask(operation, mode, PAGE_EXAMPLES // (len(searches) * len(list(schemathesis.GenerationMode))))
        else:
            ask(operation, schemathesis.GenerationMode.POSITIVE, 5)
    session.close()
    service.check()


VALID = {"queries": ["Oslo", "place"], "topk": 2, "return_scores": True, "filters": {"lang": ["nb"]}, "mode": "bm25"}
ODD: list[Any] = [None, True, -1, 0, 1.5, 10**40, "", "x" * 5000, "\0", [], {}, [[]], {"a": {"b": []}}, ["é", 3], "nb"]
PIECES = [
    b"NaN", b"Infinity", b"-0", b"1e999", b"9" * 6000, b'"\\ud800"', b'"\\u0000"', b"\xff\xfe", b"\x00", b"[" * 50_000,
    b'{"a":' * 5_000, b"]", b"}", b",", b'"', b"\xed\xa0\x80", b"\xef\xbb\xbf", b"//", b"tru", b"\r\n\r\n",
]  # fmt: skip
PATHS = ["/retrieve"] * 5 + [
    "/queries",
    "/access",
    "/healthz?x=1",
    "/docs",
    "/nowhere",
    "/retrieve/",
    "//",
    "/%00",
    "*",
]


def build_body(chance: random.Random) -> bytes:
    """A valid body with random damage."""
    asked = dict(VALID)
    for _ in range(chance.randint(0, 2)):
        asked[chance.choice([*VALID, "query", "k", "urls", "\0"])] = chance.choice(ODD)
    text = bytearray(json.dumps(asked).encode())
    for _ in range(chance.choice([0, 0, 1, 3])):
        place = chance.randrange(len(text) + 1)
        match chance.randrange(4):
            case 0:
                text[place:place] = chance.choice(PIECES)
            case 1:
                del text[place : place + chance.randint(1, 20)]
            case 2:
                text[place:place] = chance.randbytes(chance.randint(1, 8))
            case _:
                del text[place:]
    return bytes(text)


def request(chance: random.Random) -> tuple[bytes, bool]:
    """Bytes of an HTTP request, and whether it is complete, so that it must be answered."""
    method, path, content = (
        chance.choice(["POST"] * 8 + ["GET", "PUT", "BREW"]),
        chance.choice(PATHS),
        build_body(chance),
    )
    lines = [f"{method} {path} HTTP/1.1", "Host: retriever", "Content-Type: application/json"]
    kind = chance.random()
    if kind < 0.75:
        return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content, True
    if kind < 0.80:
        size = f"{len(content):x}".encode()
        head = "\r\n".join([*lines, "Transfer-Encoding: chunked", "", ""]).encode()
        return head + size + b"\r\n" + content + b"\r\n0\r\n\r\n", True
    wrong = chance.choice(["-1", "x", "1e3", "999999", "18446744073709551616", "3, 4", "", "0x10"])
    if kind < 0.85:
        return "\r\n".join([*lines, f"Content-Length: {wrong}", "", ""]).encode() + content, False
    if kind < 0.90:
        head = "\r\n".join([*lines, "Transfer-Encoding: chunked", "", ""]).encode()
        return head + chance.choice([b"zz\r\n", b"-5\r\n", b"FFFFFFFFFFFFFFFFF\r\n", b"5\r\nab"]) + content, False
    if kind < 0.95:
        text = "\r\n".join([*lines, "X: " + "y" * chance.choice([10, 70_000]), "", ""]).encode()
        return text[: chance.randrange(len(text))], False
    return chance.randbytes(chance.randint(1, 300)), False


async def answer(reader: asyncio.StreamReader) -> int | None:
    """The status of the next answer, read to its end; None where the server disconnected."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
    if b"chunked" in fields.get(b"transfer-encoding", b""):
        while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
            await reader.readexactly(size + 2)
        await reader.readexactly(2)
    else:
        await reader.readexactly(int(fields.get(b"content-length", b"0")))
    return int(head.split()[1])


async def bombard(service: Service, count: int, seed: int) -> set[int]:
    """Send malformed requests on many connections; returns the statuses of the answers."""
    host, port = service.http.split(":")
    seen: set[int] = set()

    async def send_one(chance: random.Random, requests: int) -> None:
        reader = writer = None
        for _ in range(requests):
            if writer is None or reader is None:
                reader, writer = await asyncio.open_connection(host, int(port))
            text, whole = request(chance)
            try:
                writer.write(text)
                await writer.drain()
                status = await asyncio.wait_for(answer(reader), 60 if whole else 0.05)
            except (TimeoutError, ConnectionError):
                assert not whole, text[:300]
                status = None  # an incomplete request: the connection is left open or closed
            if status is not None:
                seen.add(status)
            if not whole or status in (None, 400, 404, 405, 413):  # after these a server may hang up
                writer.close()
                writer = None

    await asyncio.gather(*(send_one(random.Random(seed + n), count // CONNECTIONS) for n in range(CONNECTIONS)))
    return seen


async def test_malformed_bytes_on_the_http_port_are_refused(service: Service) -> None:
    host, port = service.http.split(":")
    half_open = [await asyncio.open_connection(host, int(port)) for _ in range(50)]
    for _, writer in half_open:
        writer.write(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    seen = await bombard(service, RAW_REQUESTS // 4, 0)
    service.check()
    before = service.read_memory()
    seen |= await bombard(service, RAW_REQUESTS - RAW_REQUESTS // 4, 1000)
    for size in (16 * 2**20 + 1, 40 * 2**20):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode() + b" " * size)
        assert await asyncio.wait_for(answer(reader), 60) == 413
        writer.close()
    for _, writer in half_open:
        writer.close()
    service.check()
    assert seen <= ALLOWED, seen
    assert {200, 400, 404, 405, 422} <= seen
    assert service.read_memory() - before < MAY_GROW_BYTES


def build_message(chance: random.Random) -> bytes:
    """Bytes of a gRPC request: random, a damaged message, or a message that asks for odd things."""
    odd = retriever_pb2.RetrieveRequest(
        queries=[chance.choice(["", "Oslo", "x" * 9000, "\0", "é" * 99]) for _ in range(chance.choice([0, 1, 3, 5000]))]
        if chance.random() < 0.1
        else ["Oslo"],
        topk=chance.choice([0, 1, 2**31, 2**32 - 1]),
        mode=chance.choice(["", "bm25", "dense", "\0", "x" * 999]),
        rows=chance.random() < 0.5,
        filters=[
            retriever_pb2.Filter(
                field=chance.choice(["lang", "", "\0", "other"]), values=["nb"] * chance.choice([0, 1, 2000])
            )
            for _ in range(chance.choice([0, 0, 1, 9]))
        ],
    ).SerializeToString()
    match chance.randrange(3):
        case 0:
            return chance.randbytes(chance.choice([0, 1, 10, 1000]))
        case 1:
            damaged = bytearray(odd or b"\0")
            for _ in range(chance.randint(1, 5)):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            return bytes(damaged)
        case _:
            return odd


async def test_malformed_grpc_messages_are_refused(service: Service) -> None:
    def keep_bytes(value: bytes) -> bytes:
        return value

    codes: set[grpc.StatusCode] = set()
    async with grpc.aio.insecure_channel(service.grpc) as channel:
        call = channel.unary_unary("/forage.v1.Retriever/Retrieve", keep_bytes, keep_bytes)
        stream = channel.stream_stream("/forage.v1.Retriever/RetrieveStream", keep_bytes, keep_bytes)

        async def send(chance: random.Random, count: int) -> None:
            for _ in range(count):
                try:
                    await call(build_message(chance), timeout=60)
                    codes.add(grpc.StatusCode.OK)
                except grpc.aio.AioRpcError as error:
                    codes.add(error.code())

        async def stream_all(chance: random.Random, count: int) -> int:
            return len(
                [reply async for reply in stream(iter([build_message(chance) for _ in range(count)]), timeout=120)]
            )

        async def bombard_all(count: int, seed: int) -> None:
            half = count // 2
            each = [send(random.Random(seed + n), half // CONNECTIONS) for n in range(CONNECTIONS)]
            *_, replies = await asyncio.gather(*each, stream_all(random.Random(seed - 1), half))
            assert replies == half

        sizes = []
        for seed in (1, 1000, 2000, 3000):
            await bombard_all(GRPC_MESSAGES // 4, seed)
            sizes.append(service.read_memory())
        # How much allocators keep depends on how many messages met; a leak would add to every round.
        assert min(after - before for before, after in pairwise(sizes)) < MAY_GROW_BYTES / 3, sizes
        reply = await retriever_pb2_grpc.RetrieverStub(channel).Retrieve(
            retriever_pb2.RetrieveRequest(queries=["Oslo"], topk=1), timeout=60
        )
        assert reply.results[0].documents[0].id == "p1"
    assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}, codes
    assert len(codes) >= 2
    service.check()
