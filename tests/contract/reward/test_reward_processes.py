"""The reward service under load and injury: streams, full queues, deadlines, several workers, shadows, user code."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from forage_common.v1 import reward_pb2, reward_pb2_grpc, trajectory_pb2

OK, TIMEOUT = trajectory_pb2.STATUS_OK, trajectory_pb2.STATUS_TIMEOUT
ANSWERED_OR_REFUSED = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}


@dataclass(frozen=True)
class Service:
    process: Any
    address: str
    health_address: str

    def stub(self) -> reward_pb2_grpc.RewardStub:
        """Over a connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 2**28)]
        return reward_pb2_grpc.RewardStub(grpc.insecure_channel(self.address, options=options))

    def metric(self, name: str) -> float:
        """The sum over all label sets that begin with `name`."""
        with urllib.request.urlopen(f"http://{self.health_address}/metrics", timeout=20) as page:
            text = page.read().decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


@pytest.fixture
def start(
    start_service: Callable[..., Any],
    wait_until_ready: Callable[..., None],
    free_address: Callable[[], str],
    repository: Path,
) -> Callable[..., Service]:
    """Start a service with the test's user reward `mine` for the data source `user`."""

    def service(*overrides: str) -> Service:
        address, health = free_address(), free_address()
        code = repository / "tests/data/reward/user_reward.py"
        process = start_service(
            "reward",
            f"reward.grpc_address={address}",
            f"reward.health_address={health}",
            f"reward.user.mine={{path: {code}, timeout_s: 3, memory_mib: 256}}",
            "reward.routes.world_facts={name: em}",
            "reward.routes.user={name: mine}",
            *overrides,
        )
        wait_until_ready(process, health)
        return Service(process, address, health)

    return service


def item(number: int = 0, source: str = "world_facts", target: str = "Oslo") -> reward_pb2.ScoreItem:
    return reward_pb2.ScoreItem(
        trajectory_id=f"t{number}",
        data_source=source,
        spans=[trajectory_pb2.Span(role=trajectory_pb2.ROLE_MODEL, text="<answer>Oslo</answer>")],
        ground_truth=trajectory_pb2.GroundTruth(targets=[target]),
    )


def batch(size: int, **fields: str) -> reward_pb2.ScoreRequest:
    return reward_pb2.ScoreRequest(items=[item(number, **fields) for number in range(size)])


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_a_stream_answers_each_request_once_and_the_quick_before_the_slow(start: Callable[..., Service]) -> None:
    requests = [reward_pb2.ScoreStreamRequest(id=0, item=item(0, "user", "hang"))]
    requests += [reward_pb2.ScoreStreamRequest(id=number, item=item(number)) for number in range(1, 501)]
    replies = list(start().stub().ScoreStream(iter(requests), timeout=60))
    assert sorted(reply.id for reply in replies) == list(range(501))
    assert {reply.item.trajectory_id for reply in replies} == {f"t{number}" for number in range(501)}
    assert replies[-1].id == 0
    assert replies[-1].item.score.status == TIMEOUT
    assert {reply.item.score.status for reply in replies[:-1]} == {OK}


def test_a_stream_whose_replies_nobody_reads_is_read_no_further(start: Callable[..., Service]) -> None:
    service = start()
    sent = threading.Semaphore(0)
    total = 200_000
    taken = 0

    def requests() -> Iterator[reward_pb2.ScoreStreamRequest]:
        nonlocal taken
        for number in range(total):
            taken = number
            sent.release()
            big = item(number)
            big.spans[0].text = "x" * 4000 + big.spans[0].text
            yield reward_pb2.ScoreStreamRequest(id=number, item=big)

    stub = service.stub()
    call = stub.ScoreStream(requests())
    next(call)
    before = -1
    while before != taken:  # until the stream stands still
        before = taken
        time.sleep(1.0)
    assert taken < total / 2
    assert stub.Score(batch(1), timeout=20).items[0].score.status == OK
    call.cancel()
    eventually(lambda: service.metric("forage_reward_queue_items") == 0.0, "the stream's items are still held")


def test_describe_names_parameters_uses_and_the_configuration(start: Callable[..., Service]) -> None:
    setting = "reward.routes.nq={components: [{name: em, weight: 2.0, params: {score: 0.5}}, {name: f1}]}"
    stub = start(setting, "reward.shadow.nq={name: subem}").stub()
    whole = stub.Describe(reward_pb2.DescribeRequest(), timeout=20)
    rewards = {reward.name: reward for reward in whole.rewards}
    parameters = {p.name: (p.type, p.default_value) for p in rewards["em"].parameters}
    assert parameters == {"score": ("float", "1.0"), "format_score": ("float", "0.0")}
    use = next(use for use in rewards["em"].uses if use.data_source == "nq")
    assert (use.component, use.weight, use.params["score"].number, use.shadow) == ("em", 2.0, 0.5, False)
    assert [(use.data_source, use.shadow) for use in rewards["subem"].uses] == [("nq", True)]
    assert (rewards["mine"].user, rewards["em"].user) == (True, False)
    one = stub.Describe(reward_pb2.DescribeRequest(name="f1"), timeout=20)
    assert [reward.name for reward in one.rewards] == ["f1"]
    assert one.config_digest == whole.config_digest
    assert re.fullmatch(r"[0-9a-f]{64}", whole.config_digest)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Describe(reward_pb2.DescribeRequest(name="nothing"), timeout=20)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_full_queue_refuses_with_resource_exhausted_and_recovers(start: Callable[..., Service]) -> None:
    service = start("reward.max_queue=4")
    stub = service.stub()
    slow = stub.Score.future(batch(4, source="user", target="hang"), timeout=60)
    eventually(lambda: service.metric("forage_reward_queue_items") == 4.0, "the slow call was not taken")
    with pytest.raises(grpc.RpcError) as caught:
        stub.Score(batch(1), timeout=20)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "4 trajectories are queued, the limit is 4" in caught.value.details()
    slow.cancel()
    eventually(lambda: service.metric("forage_reward_queue_items") == 0.0, "the queue stays full")
    assert len(stub.Score(batch(100), timeout=20).items) == 100  # an empty queue takes a batch of any size
    assert service.metric('forage_reward_refused_total{method="Score"}') == 1.0


def test_what_the_deadline_does_not_reach_is_timeout_and_the_rest_is_scored(start: Callable[..., Service]) -> None:
    stub = start().stub()
    request = reward_pb2.ScoreRequest(items=[item(0), item(1, "user", "hang"), item(2)])
    reply = stub.Score(request, timeout=1.5)
    assert [scored.score.status for scored in reply.items] == [OK, TIMEOUT, OK]
    assert [scored.trajectory_id for scored in reply.items] == ["t0", "t1", "t2"]


def test_user_code_that_dies_costs_one_trajectory_and_no_other(start: Callable[..., Service]) -> None:
    service = start()
    stub = service.stub()
    for order in ("exit", "segfault", "memory", "nan"):
        reply = stub.Score(reward_pb2.ScoreRequest(items=[item(0, "user", order), item(1)]), timeout=30)
        assert [scored.score.status for scored in reply.items] == [trajectory_pb2.STATUS_INTERNAL, OK]
        assert stub.Score(batch(1, source="user", target="number"), timeout=30).items[0].score.total == 3.0
    assert service.metric("forage_reward_user_restarts_total") == 3.0


def test_user_code_that_cannot_be_loaded_is_one_sentence_and_exit_code_2(start_service: Callable[..., Any]) -> None:
    process = start_service("reward", "reward.user.mine={path: nowhere.py}", "reward.workers=1")
    _, log = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "reward.user.mine: nowhere.py is not a Python file" in log


def test_on_sigterm_calls_in_flight_are_finished_and_no_process_stays(start: Callable[..., Service]) -> None:
    service = start("reward.workers=2", "reward.shadow.world_facts={name: f1}")
    family = psutil.Process(service.process.pid).children(recursive=True)
    calls = [service.stub().Score.future(batch(1, source="user", target="hang"), timeout=60) for _ in range(4)]
    eventually(lambda: service.metric("forage_reward_queue_items") == 4.0, "the calls were not taken")
    service.process.send_signal(signal.SIGTERM)
    for call in calls:
        assert call.result().items[0].score.status == TIMEOUT
    _, log = service.process.communicate(timeout=60)
    assert service.process.returncode == 0
    assert '"event": "stopped"' in log
    eventually(lambda: not any(process.is_running() for process in family), f"{family} are still there")


def test_workers_score_a_long_batch_together_and_do_without_one_that_is_gone(start: Callable[..., Service]) -> None:
    service = start("reward.workers=2")
    request = reward_pb2.ScoreRequest(items=[item(n, target="Oslo" if n % 3 else "Rome") for n in range(200)])

    def check() -> None:
        reply = service.stub().Score(request, timeout=20)
        assert [scored.trajectory_id for scored in reply.items] == [f"t{n}" for n in range(200)]
        assert [scored.score.total for scored in reply.items] == [float(n % 3 > 0) for n in range(200)]

    check()
    assert service.metric("forage_reward_shared_items_total") == 100.0
    assert service.metric("forage_reward_items_total") == 200.0
    assert service.metric("forage_reward_queue_items") == 0.0
    workers = [p for p in psutil.Process(service.process.pid).children() if "forage_reward.serve.worker" in p.cmdline()]
    workers[0].suspend()  # it still has its sockets, and will never answer
    killer = threading.Timer(1.0, workers[0].kill)
    killer.start()
    answered = 0
    while killer.is_alive() or not answered:  # connections that the kernel gives to the other one
        with contextlib.suppress(grpc.RpcError):
            check()
            answered += 1
    eventually(lambda: service.metric("forage_reward_worker_restarts_total") == 1.0, "no restart")
    shared = service.metric("forage_reward_shared_items_total")
    eventually(lambda: check() or service.metric("forage_reward_shared_items_total") > shared, "no more sharing")


def test_a_worker_killed_under_load_costs_no_answer_and_comes_back(start: Callable[..., Service]) -> None:
    service = start("reward.workers=2")
    workers = [p for p in psutil.Process(service.process.pid).children() if "forage_reward.serve.worker" in p.cmdline()]
    assert len(workers) == 2
    with urllib.request.urlopen(f"http://{service.health_address}/metrics", timeout=20) as page:
        assert b'forage_common_waiting{what="start"} 0.0' in page.read(), "of the process that has no worker's page"
    stop = threading.Event()
    outcomes: list[Any] = []

    def client() -> None:
        stub = service.stub()
        while not stop.is_set():
            try:
                outcomes.append(len(stub.Score(batch(8), timeout=20).items))
            except grpc.RpcError as error:
                outcomes.append(error.code())
                time.sleep(0.05)

    clients = [threading.Thread(target=client) for _ in range(8)]
    for thread in clients:
        thread.start()
    eventually(lambda: len(outcomes) > 50, "no load")
    os.kill(workers[0].pid, signal.SIGKILL)
    eventually(lambda: service.metric("forage_reward_worker_restarts_total") == 1.0, "no restart")
    seen = len(outcomes)
    eventually(lambda: len(outcomes) > seen + 100, "the load ended")
    stop.set()
    for thread in clients:
        thread.join()
    assert set(outcomes) <= {8, *ANSWERED_OR_REFUSED}
    answered = outcomes.count(8) * 8
    # The metrics of all workers add up, those of the dead one included; its unanswered calls may be in them.
    assert answered <= service.metric("forage_reward_items_total") <= answered + 8 * len(clients)


def test_a_taken_port_is_one_sentence_for_several_workers_too(
    start: Callable[..., Service], start_service: Callable[..., Any], free_address: Callable[[], str]
) -> None:
    first = start("reward.workers=2")
    overrides = [f"reward.grpc_address={first.address}", f"reward.health_address={free_address()}", "reward.workers=2"]
    second = start_service("reward", *overrides)
    _, log = second.communicate(timeout=60)
    assert second.returncode == 2
    assert f"cannot listen on {first.address}" in log


def test_a_shadow_is_in_the_metrics_and_never_in_a_reply(start: Callable[..., Service]) -> None:
    plain, shadowed = start(), start("reward.shadow.world_facts={name: em, params: {score: 5.0}}")
    request = batch(20)
    assert shadowed.stub().Score(request, timeout=20) == plain.stub().Score(request, timeout=20)
    labels = '{data_source="world_facts"'
    eventually(lambda: shadowed.metric(f"forage_reward_shadow_items_total{labels}") == 20.0, "the shadow did not score")
    assert shadowed.metric(f'forage_reward_shadow_difference_bucket{labels},le="1.0"') == 0.0
    assert shadowed.metric(f'forage_reward_shadow_difference_bucket{labels},le="+Inf"') == 20.0
    assert shadowed.metric(f"forage_reward_shadow_disagreements_total{labels}") == 20.0
    assert shadowed.metric("forage_reward_items_total") == 20.0


def test_a_shadow_that_cannot_keep_up_drops_and_counts(start: Callable[..., Service]) -> None:
    service = start("reward.shadow.world_facts={name: mine}", "reward.shadow_queue=2")
    assert len(service.stub().Score(batch(30, target="hang"), timeout=20).items) == 30
    dropped = service.metric("forage_reward_shadow_dropped_total")
    assert 27.0 <= dropped <= 28.0  # two wait; one may be in the shadow's hands


def test_a_canary_is_counted_logged_and_changes_no_score(start: Callable[..., Service]) -> None:
    service = start()
    twice = item()
    twice.spans[0].text = "<answer>Rome</answer><answer>Oslo</answer>"
    reply = service.stub().Score(reward_pb2.ScoreRequest(items=[twice, item()]), timeout=20)
    assert [scored.score.total for scored in reply.items] == [1.0, 1.0]
    assert service.metric('forage_reward_canaries_total{canary="many_answers",data_source="world_facts"}') == 1.0
    service.process.send_signal(signal.SIGTERM)
    _, log = service.process.communicate(timeout=60)
    assert log.count('"event": "canary"') == 1
    assert '"canary": "many_answers", "trajectory": "t0"' in log
