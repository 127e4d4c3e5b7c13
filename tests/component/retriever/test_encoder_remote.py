"""The remote encoder against a real server of its protocol, working and failing."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from hostile_server import NONSENSE, SLOW, TOO_LARGE, Serve, open_hostile_server, redirect_to
from retriever_parts import LONG_S
from tei_server import MAX_BATCH, Server, serve_tei
from tenacity import wait_fixed

from forage_retriever.encoders import tei
from forage_retriever.encoders.encoder import Encoder
from forage_retriever.encoders.factory import create_encoder
from forage_retriever.encoders.remote_encoder import RemoteEncoder
from forage_runtime.clients.calls import GIVEN_UP, MalformedReplyError
from forage_runtime.errors import UnavailableError, UserError
from forage_runtime.settings import EncoderSettings, RetrieverSettings

TEXTS = [f"{'word ' * number}{number}" for number in range(2 * MAX_BATCH + 1)]


@pytest.fixture
def server(encoder: Encoder) -> Iterator[Server]:
    with serve_tei(encoder, lambda query, texts: [0.0] * len(texts)) as server:
        yield server


def test_a_remote_encoder_gives_the_vectors_of_its_endpoint_in_order(server: Server, encoder: Encoder) -> None:
    remote = create_encoder(RetrieverSettings(encoder=EncoderSettings(model=server.url + "/")))
    assert (remote.model, remote.convention.name) == ("sentence-transformers/all-MiniLM-L6-v2", "minilm")
    assert (remote.dimension, remote.precision, remote.family) == (encoder.dimension, "remote", "")
    done: list[int] = []
    assert np.array_equal(remote.encode_passages(TEXTS, done.append), encoder.encode_queries(TEXTS))
    assert done == [MAX_BATCH, 2 * MAX_BATCH, len(TEXTS)]
    assert remote.encode_queries([]).shape == (0, encoder.dimension)


def test_prefixes_precede_texts_and_change_the_digest(server: Server, encoder: Encoder) -> None:
    plain, prefixed = (RemoteEncoder(server.url, convention, LONG_S) for convention in ("auto", "e5"))
    assert np.array_equal(prefixed.encode_queries(["Oslo"]), encoder.encode_queries(["query: Oslo"]))
    assert np.array_equal(prefixed.encode_passages(["Oslo"], print), encoder.encode_queries(["passage: Oslo"]))
    assert plain.digest != prefixed.digest


def test_the_start_waits_for_the_endpoint_and_calls_are_retried(
    server: Server, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tei, "wait_random_exponential", lambda **_: wait_fixed(0.05))
    server.failures = [503] * 7  # more than open the circuit breaker
    remote = RemoteEncoder(server.url, "auto", LONG_S, start_s=LONG_S)
    assert server.calls.count("/info") == 8
    server.failures = [429, 503]
    assert np.array_equal(remote.encode_queries(["Oslo"]), encoder.encode_queries(["Oslo"]))


def test_a_hanging_endpoint_is_given_up_at_the_deadline(server: Server) -> None:
    remote = RemoteEncoder(server.url, "auto", LONG_S)
    remote._tei._timeout_s = 0.3
    server.failures = [0]
    before = GIVEN_UP.labels("encoder")._value.get()
    with pytest.raises(UnavailableError, match=r"the encoder at http://127.* gave no answer within 0.3 s"):
        remote.encode_queries(["Oslo"])
    assert GIVEN_UP.labels("encoder")._value.get() == before + 1


def test_replies_that_violate_the_protocol_are_refused(server: Server) -> None:
    remote = RemoteEncoder(server.url, "auto", LONG_S)
    server.failures = [200]
    with pytest.raises(MalformedReplyError, match=r"/embed gave no JSON"):
        remote.encode_queries(["Oslo"])
    server.width = 7
    with pytest.raises(MalformedReplyError, match=r"gave vectors of 7 numbers, no longer 384"):
        remote.encode_queries(["Oslo"])


def test_an_address_without_a_server_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(UserError, match=rf"retriever.encoder.model {url} serves no encoder .*start text-embeddings"):
        RemoteEncoder(url, "auto", 1, start_s=0.5)


_HOSTILE = {**TOO_LARGE, **SLOW, **NONSENSE, "a redirect": redirect_to("http://127.0.0.1:1/")}


@pytest.mark.parametrize("serve", _HOSTILE.values(), ids=_HOSTILE.keys())
def test_an_endpoint_that_wishes_ill_costs_a_call(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    monkeypatch.setattr(tei, "MAX_REPLY_BYTES", 2**20)
    with open_hostile_server() as server:
        server.serve = serve
        client = tei.TeiClient("encoder", f"http://user:S3cr3t@{server.address}", 0.5)
        with pytest.raises((MalformedReplyError, UnavailableError, httpx.HTTPStatusError)) as refused:
            client.embed(["x"], normalize=True)
    assert "S3cr3t" not in str(refused.value)
