"""Requests of HTTP: as an OpenAPI page describes them, with damaged bodies, and bytes that are no HTTP."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import requests
import schemathesis

from fuzz.damage import ODD_TEXTS, damage, damage_json
from fuzz.inputs import Input
from fuzz.messages import draw

_LEFT_OUT = ("content-length", "transfer-encoding", "host", "x-schemathesis-testcaseid")
"""Headers that are written otherwise; the last one is another for each run."""

_PER_OPERATION = 12
_SECOND = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass(frozen=True)
class HttpSurface:
    """What a server of HTTP answers.

    Attributes:
        page: its OpenAPI page.
        bodies: path → valid bodies, as JSON.
        paths: of GET, valid ones; query parameters may follow.
        queries: names of query parameters → values.
        page_share: share of requests that come from the OpenAPI page.
    """

    wire: str
    page: Mapping[str, Any]
    bodies: Mapping[str, Sequence[Any]]
    paths: Sequence[str]
    queries: Mapping[str, Sequence[str]]
    page_share: float = 0.1


def generate_requests(surface: HttpSurface, seed: int) -> Iterator[Input]:
    """Requests without end, the same for the same seed."""
    chance = random.Random(seed)
    described = _generate_described(surface, chance.getrandbits(32))
    while True:
        kind = chance.random()
        if kind < surface.page_share:
            yield next(described)
        elif kind < 0.65:
            yield _make_whole(surface, chance)
        else:
            yield _make_broken(surface, chance)


def _generate_described(surface: HttpSurface, seed: int) -> Iterator[Input]:
    """Requests that schemathesis makes of the OpenAPI page, valid and invalid ones."""
    schema = schemathesis.openapi.from_dict(dict(surface.page))
    operations = [result.ok() for result in schema.get_all_operations()]
    strategies = [
        operation.as_strategy(generation_mode=mode) for operation in operations for mode in schemathesis.GenerationMode
    ]
    chance = random.Random(seed)
    while True:
        for strategy in strategies:
            try:
                cases = draw(strategy, _PER_OPERATION, chance.getrandbits(32))
            except Exception as error:
                if type(error).__name__ not in ("Unsatisfiable", "SkipTest"):
                    raise
                continue
            for case in cases:
                if (one := _write_case(surface.wire, case)) is not None:
                    yield one


def _write_case(wire: str, case: Any) -> Input | None:
    try:
        prepared = requests.Request(**case.as_transport_kwargs(base_url="http://localhost")).prepare()
    except (ValueError, UnicodeError, requests.RequestException):
        return None  # schemathesis has values that its own client cannot send
    body = prepared.body or b""
    content = body.encode(errors="surrogatepass") if isinstance(body, str) else bytes(body)
    lines = [f"{prepared.method} {prepared.path_url} HTTP/1.1".encode(errors="replace"), b"Host: localhost"]
    for name, value in prepared.headers.items():
        if str(name).lower() not in _LEFT_OUT:
            lines.append(_to_bytes(name) + b": " + _to_bytes(value))
    lines += [b"Content-Length: %d" % len(content), b"", b""]
    return Input(wire, "http", (b"\r\n".join(lines) + content,))


def _to_bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("latin-1", errors="replace")


def _make_whole(surface: HttpSurface, chance: random.Random) -> Input:
    """A request in proper HTTP whose path, parameters or body are odd."""
    if not surface.bodies or chance.random() < (0.15 if len(surface.paths) < 12 else 0.8):
        return Input(surface.wire, "http", (_write_get(surface, chance),))
    path = chance.choice(list(surface.bodies))
    content = damage_json(chance.choice(list(surface.bodies[path])), chance)
    method = chance.choice(("POST",) * 12 + ("PUT", "PUT", "PUT", "BREW", "OPTIONS"))
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    if chance.random() < 0.15:
        head = "\r\n".join([*lines, "Transfer-Encoding: chunked", "", ""]).encode()
        size = f"{len(content):x}".encode()
        return Input(surface.wire, "http", (head + size + b"\r\n" + content + b"\r\n0\r\n\r\n",))
    head = "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode()
    if chance.random() < 0.02:  # a slow body
        third = max(1, len(content) // 3)
        pieces = [content[begin : begin + third] for begin in range(0, len(content), third)][:4]
        rest = content[sum(map(len, pieces)) :]
        return Input(surface.wire, "http", (head, *pieces, rest), pause_s=0.05)
    return Input(surface.wire, "http", (head + content,))


def _write_get(surface: HttpSurface, chance: random.Random) -> bytes:
    path = chance.choice(surface.paths)
    parts = path.split("/")
    if chance.random() < 0.5 and len(parts) > 2:
        place = chance.randrange(1, len(parts))
        parts[place] = quote(chance.choice(ODD_TEXTS).encode()[:2000], safe=chance.choice(("", "/.:")))
        path = "/".join(parts)
    names = [name for name in surface.queries if chance.random() < 0.25]
    pairs = []
    for name in names:
        value = chance.choice((chance.choice(ODD_TEXTS), *surface.queries[name], *surface.queries[name]))
        pairs.append(f"{quote(name)}={quote(value.encode()[:2000])}")
    if chance.random() < 0.1:
        pairs.append(quote(chance.choice(ODD_TEXTS).encode()[:500]) + chance.choice(("", "=", "=%", "=%ff%fe", "=%00")))
    query = "?" + "&".join(pairs) if pairs else ""
    accept = chance.choice(("*/*", "text/event-stream", "application/json", "", "x" * 3000))
    method = chance.choice(("GET",) * 15 + ("HEAD", "DELETE"))
    length = "" if method == "GET" else "Content-Length: 0\r\n"
    more = chance.choice(("", "", "Range: bytes=0-\r\n", "Range: bytes=-1,5-2,9999999999-\r\n", "If-None-Match: *\r\n"))
    request = f"{method} {path}{query} HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\n{length}{more}\r\n"
    return request.replace("HEAD", "GET").encode()  # an answer to HEAD has a length and no body


def _make_broken(surface: HttpSurface, chance: random.Random) -> Input:
    """Bytes that are no request of HTTP/1.1, or only the beginning of one, or more than one."""
    body_path = chance.choice(list(surface.bodies) or ["/healthz"])
    content = json.dumps(chance.choice(list(surface.bodies.get(body_path, [{}])))).encode()
    lines = [f"POST {body_path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]

    def make(*more: str, tail: bytes = content, pause_s: float = 0.0) -> Input:
        head = "\r\n".join([*lines, *more, "", ""]).encode("latin-1", errors="replace")
        parts = (head, tail) if pause_s else (head + tail,)
        return Input(surface.wire, "http", parts, complete=False, pause_s=pause_s)

    if chance.random() < 0.002:  # more than any server takes
        size = 17 * 2**20
        return make(f"Content-Length: {size}", tail=b" " * size)
    match chance.randrange(14):
        case 0:
            wrong = chance.choice(("-1", "x", "1e3", "999999", "18446744073709551616", "3, 4", "", "0x10", "+5", "५"))
            return make(f"Content-Length: {wrong}")
        case 1:
            sizes = (
                b"zz\r\n",
                b"-5\r\n",
                b"FFFFFFFFFFFFFFFFF\r\n",
                b"5\r\nab",
                b"5;" + b"x" * 70_000 + b"\r\n",
                b"\r\n",
            )
            return make("Transfer-Encoding: chunked", tail=chance.choice(sizes) + content)
        case 2:  # one server sees one request where another sees two
            return make(f"Content-Length: {len(content)}", "Transfer-Encoding: chunked", tail=b"0\r\n\r\n" + _SECOND)
        case 3:
            return make("Transfer-Encoding: " + chance.choice(("xchunked", "chunked, identity", "gzip", "\x0bchunked")))
        case 4:
            return make("X: " + "y" * chance.choice((10, 8_000, 70_000, 400_000)), f"Content-Length: {len(content)}")
        case 5:
            return make(*(f"X-{n}: {n}" for n in range(chance.choice((50, 500, 5_000)))), "Content-Length: 0", tail=b"")
        case 6:
            odd = (
                "no colon",
                ": no name",
                "Sp ace: x",
                "X:\0y",
                " folded",
                "X: \xff\xfe",
                "Host: a",
                "Host:",
                "\x7f: 1",
            )
            return make(chance.choice(odd), f"Content-Length: {len(content)}")
        case 7:
            line = chance.choice((
                "GET", "GET /", "GET / HTTP/9.9", "GET / HTTP/1.1 HTTP/1.1", "PRI * HTTP/2.0",
                "GET http://[::1 HTTP/1.1",
                "get / http/1.1", "GET /%zz%f HTTP/1.1", "GET //../..//etc HTTP/1.1", "CONNECT a:1 HTTP/1.1", "* * *",
                "GET /" + "a/" * 20_000 + " HTTP/1.1", "GET /?" + "a&" * 20_000 + " HTTP/1.1", "GET \0 HTTP/1.1",
                "OPTIONS * HTTP/1.1", "GET /é\u202e HTTP/1.1",
            ))  # fmt: skip
            return Input(surface.wire, "http", (line.encode() + b"\r\nHost: localhost\r\n\r\n",), complete=False)
        case 8:
            hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(200)
            preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + chance.randbytes(40)
            return Input(surface.wire, "http", (chance.choice((hello, preface)),), complete=False)
        case 9:
            return Input(surface.wire, "http", (chance.randbytes(chance.randint(1, 300)),), complete=False)
        case 10:  # several requests at once, the last of them cut
            whole = make(f"Content-Length: {len(content)}").parts[0]
            return Input(surface.wire, "http", (whole * chance.choice((2, 20)) + whole[:40],), complete=False)
        case 11:  # a connection that ends within the body
            return make(f"Content-Length: {len(content) + 50}")
        case 12:
            return make(f"Content-Length: {len(content)}", "Expect: 100-continue", pause_s=0.02)
        case _:
            whole = make(f"Content-Length: {len(content)}").parts[0]
            return Input(surface.wire, "http", (damage(whole, chance),), complete=False)
