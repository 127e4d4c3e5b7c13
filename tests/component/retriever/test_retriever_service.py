"""The retriever as a process: HTTP and gRPC over one core, probes, start and stop."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from retriever_service import Service, assert_transports_agree, make_settings, start_one
from service_ports import check_grpc_port
from service_process import StartService
from waiting import WAIT_S

from forage_proto.v1 import retriever_pb2, retriever_pb2_grpc
from forage_runtime.devices import count_cpus


def test_both_transports_give_the_same_documents_and_provenance(shared_service: Service) -> None:
    assert_transports_agree(shared_service, "bm25")


def test_probes_metrics_and_reflection_are_served(shared_service: Service) -> None:
    names = (
        'forage_retriever_queries_total{cache="hit"}',
        'forage_retriever_requests_total{code="200",transport="http"}',
    )
    before = [shared_service.read_metric(name) for name in names]
    shared_service.search(["Oslo of the probes", "Kandy of the probes"], 1)
    shared_service.search(["Oslo of the probes"], 1)
    assert [shared_service.read_metric(name) - seen for name, seen in zip(names, before, strict=True)] == [1.0, 2.0]
    assert check_grpc_port(shared_service.settings["retriever.grpc_address"], "forage.v1.Retriever") == "SERVING"


def test_an_excessive_request_is_refused_over_grpc(shared_service: Service) -> None:
    stub = retriever_pb2_grpc.RetrieverStub(shared_service.channel)
    with pytest.raises(grpc.RpcError) as error:
        stub.Retrieve(retriever_pb2.RetrieveRequest(queries=["x"] * 70_000), timeout=WAIT_S)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (
        len(stub.Retrieve(retriever_pb2.RetrieveRequest(queries=["place"]), timeout=WAIT_S).results[0].documents) == 3
    )


def test_sigterm_drains_and_stops(
    start_service: StartService,
    wait_until_ready: Callable[..., None],
    tmp_path: Path,
    free_address: Callable[[], str],
) -> None:
    service = start_one(start_service, wait_until_ready, make_settings(tmp_path, free_address))
    service.process.send_signal(signal.SIGTERM)
    _, log = service.process.communicate(timeout=WAIT_S)
    assert service.process.returncode == 0
    assert '"event": "stopped"' in log
    assert f'"threads": "{count_cpus()} (automatic)", "event": "computes_on"' in log


def test_a_port_in_use_is_one_sentence_and_exit_code_2(
    shared_service: Service, start_service: StartService, free_address: Callable[[], str]
) -> None:
    address = shared_service.settings["retriever.http_address"]
    chosen = {**shared_service.settings, "retriever.grpc_address": free_address()}
    second = start_service("retriever", *(f"{key}={value}" for key, value in chosen.items()))
    _, log = second.communicate(timeout=WAIT_S)
    assert second.returncode == 2
    assert f"cannot listen on {address}" in log
    assert "Traceback" not in log


def test_a_bad_corpus_is_one_sentence_and_exit_code_2(
    start_service: StartService, tmp_path: Path, free_address: Callable[[], str]
) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"id": "a"}\n')
    settings = make_settings(tmp_path, free_address)
    process = start_service("retriever", *(f"{key}={value}" for key, value in settings.items()))
    _, log = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert "corpus.jsonl:1: field 'contents' is missing" in log
    assert "Traceback" not in log
    assert not (tmp_path / "cache").exists()
