"""A reward service of several workers, under load and with one that dies; and the memory of one process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from certificates import Issuer
from reward_process import Service, assert_sigterm_finishes_calls, build_batch, build_item
from reward_wire import NO_TLS, TOKEN, WRONG, Wire, tls_of, write_tokens
from waiting import WAIT_S, wait_until

from forage_proto.v1 import reward_pb2, reward_pb2_grpc, trajectory_pb2
from forage_runtime.errors import SettingsError
from forage_runtime.security.channels import open_channel

ANSWERED_OR_REFUSED = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path / "authority")


def list_workers(service: Service) -> list[psutil.Process]:
    children = psutil.Process(service.process.pid).children()
    workers = [process for process in children if "forage_reward.serve.worker" in process.cmdline()]
    assert len(workers) == 2
    return workers


def test_a_worker_killed_under_load_loses_no_answer_and_is_restarted(workers: Service) -> None:
    assert 'forage_common_waiting{what="start"} 0.0' in workers.read_metrics(), "the supervisor's metrics are missing"
    names = ("forage_reward_worker_restarts_total", "forage_reward_items_total")
    restarts, scored = map(workers.read_metric, names)
    stop = threading.Event()
    outcomes: list[Any] = []

    def call_in_turn() -> None:
        stub = workers.open_stub()
        while not stop.is_set():
            try:
                outcomes.append(len(stub.Score(build_batch(8), timeout=WAIT_S).items))
            except grpc.RpcError as error:
                outcomes.append(error.code())
                time.sleep(0.05)

    clients = [threading.Thread(target=call_in_turn) for _ in range(8)]
    for thread in clients:
        thread.start()
    wait_until(lambda: len(outcomes) > 50, "no load")
    list_workers(workers)[0].kill()
    wait_until(lambda: workers.read_metric("forage_reward_worker_restarts_total") == restarts + 1.0, "no restart")
    seen = len(outcomes)
    wait_until(lambda: len(outcomes) > seen + 100, "the load ended")
    stop.set()
    for thread in clients:
        thread.join()
    assert set(outcomes) <= {8, *ANSWERED_OR_REFUSED}
    answered = outcomes.count(8) * 8
    # The metrics of all workers add up, those of the dead one included; its unanswered calls may be in them.
    assert answered <= workers.read_metric("forage_reward_items_total") - scored <= answered + 8 * len(clients)


def test_workers_share_a_long_batch_and_manage_without_one_that_has_died(workers: Service) -> None:
    request = reward_pb2.ScoreRequest(items=[build_item(n, target="Oslo" if n % 3 else "Rome") for n in range(200)])
    names = ("forage_reward_shared_items_total", "forage_reward_items_total", "forage_reward_worker_restarts_total")
    shared, scored, restarts = map(workers.read_metric, names)
    checked = 0

    def check() -> None:
        nonlocal checked
        reply = workers.open_stub().Score(request, timeout=WAIT_S)
        assert [scored.trajectory_id for scored in reply.items] == [f"t{n}" for n in range(200)]
        assert [scored.score.total for scored in reply.items] == [float(n % 3 > 0) for n in range(200)]
        checked += 1

    # A worker shares with those that it knows and that answer at once.
    wait_until(lambda: check() or workers.read_metric(names[0]) > shared, "no sharing")
    assert workers.read_metric("forage_reward_shared_items_total") == shared + 100.0
    assert workers.read_metric("forage_reward_items_total") == scored + 200.0 * checked
    assert workers.read_metric("forage_reward_queue_items") == 0.0
    victim = list_workers(workers)[0]
    victim.suspend()  # it still has its sockets, and will never answer
    killer = threading.Timer(1.0, victim.kill)
    killer.start()
    answered = 0
    while killer.is_alive() or not answered:  # connections that the kernel gives to the other one
        with contextlib.suppress(grpc.RpcError):
            check()
            answered += 1
    wait_until(lambda: workers.read_metric("forage_reward_worker_restarts_total") == restarts + 1.0, "no restart")
    shared = workers.read_metric("forage_reward_shared_items_total")
    wait_until(lambda: check() or workers.read_metric("forage_reward_shared_items_total") > shared, "no more sharing")


def test_a_port_in_use_is_one_sentence_for_several_workers_too(
    workers: Service, start_service: Callable[..., Any], free_address: Callable[[], str]
) -> None:
    overrides = [
        f"reward.grpc_address={workers.address}",
        f"reward.health_address={free_address()}",
        "reward.workers=2",
    ]
    second = start_service("reward", *overrides)
    _, log = second.communicate(timeout=WAIT_S)
    assert second.returncode == 2
    assert f"cannot listen on {workers.address}" in log


async def test_memory_does_not_grow_with_the_requests_that_arrive_at_once(start: Callable[..., Service]) -> None:
    service = start()
    item = reward_pb2.ScoreItem(data_source="nowhere", spans=[trajectory_pb2.Span(text="x" * 15 * 2**20)])
    request = reward_pb2.ScoreRequest(items=[item])
    async with open_channel(service.address, NO_TLS) as channel:
        stub = reward_pb2_grpc.RewardStub(channel)
        replies = await asyncio.gather(*(stub.Score(request, timeout=300) for _ in range(40)), return_exceptions=True)
    refused = [reply for reply in replies if isinstance(reply, grpc.RpcError)]
    assert {error.code() for error in refused} <= {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert len(refused) < len(replies)
    status = Path(f"/proc/{service.process.pid}/status").read_text()
    assert int(status.partition("VmHWM:")[2].split()[0]) < 450 * 1024  # of 600 MiB


def test_workers_that_share_a_port_share_its_certificate_and_tokens(
    start: Callable[..., Service], tmp_path: Path, issuer: Issuer
) -> None:
    file, own = write_tokens(tmp_path / "tokens", TOKEN), issuer.issue("reward")
    service = start(
        "reward.workers=2",
        f"reward.auth_token_file={file}",
        f"tls.ca={issuer.ca}",
        f"tls.cert={own.cert}",
        f"tls.key={own.key}",
    )
    wire, tls = Wire(service.address, file), tls_of(issuer)
    for _ in range(6):  # each a connection, which the kernel gives to either worker
        assert wire.score(tls, file) == 1.0
        with pytest.raises(SettingsError, match="does not know the one sent"):
            wire.score(tls, write_tokens(tmp_path / "own", WRONG))
    assert service.read_metric('forage_common_refused_callers_total{reason="wrong_token"') == 6
    ends = [end for worker in psutil.Process(service.process.pid).children() for end in worker.net_connections("unix")]
    sockets = {Path(end.laddr) for end in ends if end.laddr.endswith(".sock")}
    assert [socket.stat().st_mode & 0o777 for socket in sockets] == [0o600, 0o600]
    log = service.log.read_text()
    assert 1 <= log.count('"event": "caller_refused"') <= 6  # a line a second
    assert TOKEN not in log
    assert WRONG not in log


def test_sigterm_finishes_calls_in_flight_of_all_workers(start: Callable[..., Service]) -> None:
    assert_sigterm_finishes_calls(
        start("reward.workers=2", "reward.routes.f1={name: f1}", "reward.shadow.nq=f1", user_timeout_s=4)
    )
