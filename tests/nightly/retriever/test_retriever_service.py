"""The retriever as a process: hybrid search, its start while an index is built, and indexes that are built before."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import grpc
import httpx
import pytest
from certificates import Issuer
from retriever_service import assert_transports_agree, make_settings, share_encoder, start_one
from service_process import StartService
from waiting import WAIT_S

from forage_proto.v1 import retriever_pb2, retriever_pb2_grpc


def test_both_transports_give_the_same_documents_and_provenance_of_hybrid_search(
    start_service: StartService,
    wait_until_ready: Callable[..., None],
    repository: Path,
    tmp_path: Path,
    free_address: Callable[[], str],
) -> None:
    share_encoder(repository, tmp_path)
    settings = make_settings(tmp_path, free_address) | {"retriever.mode": "hybrid"}
    assert_transports_agree(start_one(start_service, wait_until_ready, settings), "hybrid")


def test_a_second_start_reuses_the_built_index(
    start_service: StartService,
    wait_until_ready: Callable[..., None],
    tmp_path: Path,
    free_address: Callable[[], str],
) -> None:
    start_one(start_service, wait_until_ready, make_settings(tmp_path, free_address))
    folder = next((tmp_path / "cache").glob("bm25-*"))
    build_time = folder.stat().st_mtime_ns
    second = start_one(start_service, wait_until_ready, make_settings(tmp_path, free_address))
    assert second.search(["Oslo"], 1) == [["p1"]]
    assert folder.stat().st_mtime_ns == build_time


@pytest.mark.parametrize("phase", ["loading the encoder", "loading the dense index"])
def test_a_service_that_builds_its_index_is_alive_reports_progress_and_can_be_stopped(
    start_service: StartService, repository: Path, tmp_path: Path, free_address: Callable[[], str], phase: str
) -> None:
    settings, corpus = make_settings(tmp_path, free_address), tmp_path / "corpus.jsonl"
    # Both take seconds: exporting an encoder, and encoding this many passages.
    if phase == "loading the dense index":
        share_encoder(repository, tmp_path)
        corpus.write_text(
            "".join(json.dumps({"id": n, "contents": f"T{n}\n{'word ' * 50}"}) + "\n" for n in range(5000))
        )
    chosen = settings | {"retriever.mode": "dense"}
    process = start_service("retriever", *(f"{key}={value}" for key, value in chosen.items()))
    base = f"http://{settings['retriever.http_address']}"
    with httpx.Client(transport=httpx.HTTPTransport(retries=50), timeout=WAIT_S) as client:
        while phase not in (probe := client.get(f"{base}/readyz")).text:
            assert probe.status_code == 503
        assert client.get(f"{base}/healthz").status_code == 200
        refusal = client.post(f"{base}/retrieve", json={"queries": ["Oslo"], "timeout_s": 0.1})
    assert (refusal.status_code, refusal.headers["Retry-After"]) == (503, "1")
    assert phase in refusal.json()["detail"]
    with grpc.insecure_channel(settings["retriever.grpc_address"]) as channel, pytest.raises(grpc.RpcError) as error:
        retriever_pb2_grpc.RetrieverStub(channel).Retrieve(retriever_pb2.RetrieveRequest(), timeout=WAIT_S)
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, log


def test_a_grpc_port_in_use_is_one_sentence_and_exit_code_2(
    start_service: StartService,
    wait_until_ready: Callable[..., None],
    tmp_path: Path,
    free_address: Callable[[], str],
) -> None:
    first = start_one(start_service, wait_until_ready, make_settings(tmp_path, free_address))
    chosen = {**first.settings, "retriever.http_address": free_address()}
    second = start_service("retriever", *(f"{key}={value}" for key, value in chosen.items()))
    _, log = second.communicate(timeout=WAIT_S)
    assert second.returncode == 2
    assert f"cannot listen on {first.settings['retriever.grpc_address']}" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(("content", "sentence"), [(None, "cannot be read"), ("", "has no passages")])
def test_a_bad_corpus_is_one_sentence_and_exit_code_2(
    start_service: StartService, tmp_path: Path, free_address: Callable[[], str], content: str | None, sentence: str
) -> None:
    settings, corpus = make_settings(tmp_path, free_address), tmp_path / "corpus.jsonl"
    if content is None:
        corpus.unlink()
    else:
        corpus.write_text(content)
    process = start_service("retriever", *(f"{key}={value}" for key, value in settings.items()))
    _, log = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert sentence in log
    assert str(corpus) in log
    assert "Traceback" not in log
    assert not (tmp_path / "cache").exists()


def test_an_index_can_be_built_before_the_start(
    start_service: StartService, tmp_path: Path, free_address: Callable[[], str]
) -> None:
    settings = make_settings(tmp_path, free_address)
    process = start_service("retriever.prepare", *(f"{key}={value}" for key, value in settings.items()))
    _, log = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, log
    assert len(list((tmp_path / "cache").glob("bm25-*"))) == 1


def test_a_service_without_a_certificate_of_its_own_does_not_start(
    start_service: StartService, tmp_path: Path, free_address: Callable[[], str]
) -> None:
    (tmp_path / "authority").mkdir()
    settings = make_settings(tmp_path, free_address) | {"tls.ca": str(Issuer(tmp_path / "authority").ca)}
    process = start_service("retriever", *(f"{key}={value}" for key, value in settings.items()))
    _, log = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert "the retriever has no certificate: set tls.cert and tls.key" in log
