"""A retriever as a process, over a small corpus, for its tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
from service_process import StartService
from waiting import WAIT_S

from forage_proto.v1 import retriever_pb2, retriever_pb2_grpc

TITLES = ["Norway", "Oslo", "Kandy", "Kandi", "São Paulo"]


@dataclass(frozen=True)
class Service:
    process: Any
    settings: Mapping[str, str]

    @property
    def http(self) -> str:
        return f"http://{self.settings['retriever.http_address']}"

    @property
    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self.settings["retriever.grpc_address"])

    def search(self, queries: list[str], topk: int) -> list[list[str]]:
        """The ids that are found over HTTP."""
        body = {"queries": queries, "topk": topk}
        reply = httpx.post(f"{self.http}/retrieve", json=body, timeout=WAIT_S).raise_for_status()
        return [[document["id"] for document in documents] for documents in reply.json()["result"]]

    def read_metric(self, name: str) -> float:
        lines = httpx.get(f"{self.http}/metrics", timeout=WAIT_S).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name} "))


def write_corpus(file: Path) -> None:
    rows = [{"id": f"p{n}", "contents": f'"{title}"\n{title} is a place.'} for n, title in enumerate(TITLES)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_settings(folder: Path, free_address: Callable[[], str]) -> dict[str, str]:
    """Settings of a service over the corpus in a folder, which is written if it is not there."""
    if not (folder / "corpus.jsonl").exists():
        write_corpus(folder / "corpus.jsonl")
    return {
        "data.corpus": str(folder / "corpus.jsonl"),
        "retriever.mode": "bm25",
        "retriever.cache_dir": str(folder / "cache"),
        "retriever.http_address": free_address(),
        "retriever.grpc_address": free_address(),
    }


def share_encoder(repository: Path, folder: Path) -> None:
    """Link the encoders of the repository's cache into that of a folder; a missing one is exported again."""
    (folder / "cache").mkdir()
    for encoder in (repository / ".cache/retriever").glob("encoder-*"):
        (folder / "cache" / encoder.name).symlink_to(encoder)


def start_one(start: StartService, wait_until_ready: Callable[..., None], settings: Mapping[str, str]) -> Service:
    """Start a service, and wait for it."""
    process = start("retriever", *(f"{key}={value}" for key, value in settings.items()))
    wait_until_ready(process, settings["retriever.http_address"])
    return Service(process, settings)


def assert_transports_agree(service: Service, mode: str) -> None:
    """Assert that HTTP and gRPC give the same documents and provenance."""
    queries = [*TITLES, "place", "", "São AND ((", "title:Oslo^9"]
    over_http = service.search(queries, 4)
    request = retriever_pb2.RetrieveRequest(queries=queries, topk=4)
    reply = retriever_pb2_grpc.RetrieverStub(service.channel).Retrieve(request, timeout=WAIT_S)
    assert [[document.id for document in result.documents] for result in reply.results] == over_http
    assert [ids[0] for ids in over_http[: len(TITLES)]] == [f"p{n}" for n in range(len(TITLES))]
    assert reply.results[0].documents[0].contents == '"Norway"\nNorway is a place.'
    headers = httpx.post(f"{service.http}/retrieve", json={"queries": []}, timeout=WAIT_S).headers
    assert reply.provenance.mode == headers["X-Forage-Mode"] == mode
    assert reply.provenance.index_digest == headers["X-Forage-Index-Digest"] != ""
    assert reply.provenance.corpus_digest == headers["X-Forage-Corpus-Digest"] != ""
    assert reply.provenance.encoder_digest == headers["X-Forage-Encoder-Digest"]
