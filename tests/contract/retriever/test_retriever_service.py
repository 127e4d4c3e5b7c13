"""The retriever as a process: HTTP and gRPC over one core, probes, start and stop."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from forage_common.devices import count_cpus
from forage_common.v1 import retriever_pb2, retriever_pb2_grpc

TITLES = ["Norway", "Oslo", "Kandy", "Kandi", "São Paulo"]


@dataclass(frozen=True)
class Service:
    process: Any
    http: str
    channel: grpc.Channel


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    rows = [{"id": f"p{n}", "contents": f'"{title}"\n{title} is a place.', "n": n} for n, title in enumerate(TITLES)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def settings(corpus: Path, repository: Path, free_address: Callable[[], str]) -> dict[str, str]:
    return {
        "data.corpus": str(corpus),
        "retriever.mode": "bm25",
        "retriever.cache_dir": str(corpus.parent / "cache"),
        "retriever.http_address": free_address(),
        "retriever.grpc_address": free_address(),
    }


@pytest.fixture
def start(
    start_service: Callable[..., Any], wait_until_ready: Callable[..., None], settings: dict[str, str]
) -> Callable[..., Service]:
    def begin(**overrides: str) -> Service:
        chosen = settings | {f"retriever.{name}": value for name, value in overrides.items()}
        process = start_service("retriever", *(f"{key}={value}" for key, value in chosen.items()))
        wait_until_ready(process, chosen["retriever.http_address"])
        return Service(
            process,
            f"http://{chosen['retriever.http_address']}",
            grpc.insecure_channel(chosen["retriever.grpc_address"]),
        )

    return begin


def share_encoder(repository: Path, corpus: Path) -> None:
    """Link the encoders of the repository's cache into the test's cache; a missing one is exported again."""
    cache = corpus.parent / "cache"
    cache.mkdir()
    for folder in (repository / ".cache/retriever").glob("encoder-*"):
        (cache / folder.name).symlink_to(folder)


def search_over_http(service: Service, queries: list[str], topk: int) -> list[list[str]]:
    reply = httpx.post(f"{service.http}/retrieve", json={"queries": queries, "topk": topk}, timeout=60)
    return [[document["id"] for document in documents] for documents in reply.raise_for_status().json()["result"]]


@pytest.mark.parametrize("mode", ["bm25", "hybrid"])
def test_both_transports_give_the_same_documents_and_provenance(
    start: Callable[..., Service], repository: Path, corpus: Path, mode: str
) -> None:
    if mode == "hybrid":
        share_encoder(repository, corpus)
    service = start(mode=mode)
    queries = [*TITLES, "place", "", "São AND ((", "title:Oslo^9"]
    over_http = search_over_http(service, queries, 4)
    request = retriever_pb2.RetrieveRequest(queries=queries, topk=4)
    reply = retriever_pb2_grpc.RetrieverStub(service.channel).Retrieve(request, timeout=60)
    assert [[document.id for document in result.documents] for result in reply.results] == over_http
    assert [ids[0] for ids in over_http[: len(TITLES)]] == [f"p{n}" for n in range(len(TITLES))]
    assert reply.results[0].documents[0].contents == '"Norway"\nNorway is a place.'
    headers = httpx.post(f"{service.http}/retrieve", json={"queries": []}, timeout=60).headers
    assert reply.provenance.mode == headers["X-Forage-Mode"] == mode
    assert reply.provenance.index_digest == headers["X-Forage-Index-Digest"] != ""
    assert reply.provenance.corpus_digest == headers["X-Forage-Corpus-Digest"] != ""
    assert reply.provenance.encoder_digest == headers["X-Forage-Encoder-Digest"]


def test_probes_metrics_and_reflection_are_served(start: Callable[..., Service]) -> None:
    service = start()
    search_over_http(service, ["Oslo", "Kandy"], 1)
    search_over_http(service, ["Oslo"], 1)
    with urllib.request.urlopen(f"{service.http}/metrics", timeout=20) as page:
        text = page.read().decode()
    assert 'forage_retriever_queries_total{cache="hit"} 1.0' in text
    assert 'forage_retriever_requests_total{code="200",transport="http"} 2.0' in text
    probe = health_pb2_grpc.HealthStub(service.channel).Check(
        health_pb2.HealthCheckRequest(service="forage.v1.Retriever"), timeout=20
    )
    assert probe.status == health_pb2.HealthCheckResponse.SERVING
    assert "forage.v1.Retriever" in ProtoReflectionDescriptorDatabase(service.channel).get_services()


def test_an_excessive_request_is_refused_over_grpc(start: Callable[..., Service]) -> None:
    stub = retriever_pb2_grpc.RetrieverStub(start().channel)
    with pytest.raises(grpc.RpcError) as error:
        stub.Retrieve(retriever_pb2.RetrieveRequest(queries=["x"] * 70_000), timeout=60)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert len(stub.Retrieve(retriever_pb2.RetrieveRequest(queries=["place"]), timeout=60).results[0].documents) == 3


def test_a_second_start_reuses_the_built_index(
    start: Callable[..., Service], corpus: Path, free_address: Callable[[], str]
) -> None:
    start()
    folder = next((corpus.parent / "cache").glob("bm25-*"))
    build_time = folder.stat().st_mtime_ns
    second = start(http_address=free_address(), grpc_address=free_address())
    assert search_over_http(second, ["Oslo"], 1) == [["p1"]]
    assert folder.stat().st_mtime_ns == build_time


def test_sigterm_drains_and_stops(start: Callable[..., Service]) -> None:
    service = start()
    service.process.send_signal(signal.SIGTERM)
    _, log = service.process.communicate(timeout=60)
    assert service.process.returncode == 0
    assert '"event": "stopped"' in log
    assert f'"threads": "{count_cpus()} (automatic)", "event": "computes_on"' in log


@pytest.mark.parametrize("phase", ["loading the encoder", "loading the dense index"])
def test_a_service_that_builds_its_index_is_alive_reports_progress_and_can_be_stopped(
    start_service: Callable[..., Any], settings: dict[str, str], repository: Path, corpus: Path, phase: str
) -> None:
    # Both take seconds: exporting an encoder, and encoding this many passages.
    if phase == "loading the dense index":
        share_encoder(repository, corpus)
        corpus.write_text(
            "".join(json.dumps({"id": n, "contents": f"T{n}\n{'word ' * 50}"}) + "\n" for n in range(5000))
        )
    chosen = settings | {"retriever.mode": "dense"}
    process = start_service("retriever", *(f"{key}={value}" for key, value in chosen.items()))
    base = f"http://{settings['retriever.http_address']}"
    with httpx.Client(transport=httpx.HTTPTransport(retries=50), timeout=60) as client:
        while phase not in (probe := client.get(f"{base}/readyz")).text:
            assert probe.status_code == 503
        assert client.get(f"{base}/healthz").status_code == 200
        refusal = client.post(f"{base}/retrieve", json={"queries": ["Oslo"], "timeout_s": 0.1})
    assert (refusal.status_code, refusal.headers["Retry-After"]) == (503, "1")
    assert phase in refusal.json()["detail"]
    with grpc.insecure_channel(settings["retriever.grpc_address"]) as channel, pytest.raises(grpc.RpcError) as error:
        retriever_pb2_grpc.RetrieverStub(channel).Retrieve(retriever_pb2.RetrieveRequest(), timeout=60)
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0, log


@pytest.mark.parametrize("taken", ["http_address", "grpc_address"])
def test_a_port_in_use_is_one_sentence_and_exit_code_2(
    start: Callable[..., Service],
    start_service: Callable[..., Any],
    settings: dict[str, str],
    free_address: Callable[[], str],
    taken: str,
) -> None:
    start()
    chosen = settings | {f"retriever.{name}": free_address() for name in ("http_address", "grpc_address")}
    address = settings[f"retriever.{taken}"]
    chosen[f"retriever.{taken}"] = address
    second = start_service("retriever", *(f"{key}={value}" for key, value in chosen.items()))
    _, log = second.communicate(timeout=60)
    assert second.returncode == 2
    assert f"cannot listen on {address}" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(None, "cannot be read"), ("", "has no passages"), ('{"id": "a"}\n', ":1: field 'contents' is missing")],
)
def test_a_bad_corpus_is_one_sentence_and_exit_code_2(
    start_service: Callable[..., Any],
    settings: dict[str, str],
    corpus: Path,
    content: str | None,
    sentence: str,
) -> None:
    if content is None:
        corpus.unlink()
    else:
        corpus.write_text(content)
    process = start_service("retriever", *(f"{key}={value}" for key, value in settings.items()))
    _, log = process.communicate(timeout=60)
    assert process.returncode == 2
    assert sentence in log
    assert str(corpus) in log
    assert "Traceback" not in log
    assert not (corpus.parent / "cache").exists()


def test_an_index_can_be_built_before_the_start(
    start_service: Callable[..., Any], settings: dict[str, str], corpus: Path
) -> None:
    process = start_service("retriever.prepare", *(f"{key}={value}" for key, value in settings.items()))
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    assert len(list((corpus.parent / "cache").glob("bm25-*"))) == 1
