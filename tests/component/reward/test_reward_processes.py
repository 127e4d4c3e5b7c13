"""The reward service under load and faults: streams, full queues, deadlines, shadows, user code."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from long_folder import make_long_folder
from reward_process import Service, assert_sigterm_finishes_calls, build_batch, build_item
from waiting import WAIT_S, wait_until

from forage_proto.v1 import reward_pb2, reward_pb2_grpc, trajectory_pb2
from forage_reward.serve.server import MOST_IN_PROGRESS
from forage_reward.serve.shadow import MOST_WAITING

StartReward = Callable[..., Service]
OK, TIMEOUT = trajectory_pb2.STATUS_OK, trajectory_pb2.STATUS_TIMEOUT


def test_a_stream_answers_each_request_once_and_does_not_wait_for_slow_ones(service: Service) -> None:
    requests = [reward_pb2.ScoreStreamRequest(id=0, item=build_item(0, "hurried", "hang"))]
    requests += [reward_pb2.ScoreStreamRequest(id=number, item=build_item(number)) for number in range(1, 501)]
    replies = list(service.open_stub().ScoreStream(iter(requests), timeout=WAIT_S))
    assert replies[0].id != 0
    assert sorted(reply.id for reply in replies) == list(range(501))
    assert {reply.item.trajectory_id for reply in replies} == {f"t{number}" for number in range(501)}
    statuses = {reply.id: reply.item.score.status for reply in replies}
    assert statuses.pop(0) == TIMEOUT
    assert set(statuses.values()) == {OK}


def test_a_stream_whose_replies_are_not_read_is_not_read_further(service: Service) -> None:
    total = 20_000
    taken = 0

    def iterate_requests() -> Iterator[reward_pb2.ScoreStreamRequest]:
        nonlocal taken
        for number in range(total):
            taken = number
            large = build_item(number)
            large.trajectory_id = "x" * 40_000  # part of the reply, so that few replies fill the connection
            yield reward_pb2.ScoreStreamRequest(id=number, item=large)

    stub = service.open_stub()
    call = stub.ScoreStream(iterate_requests())
    next(call)
    before = -1
    while before != taken:  # until the stream stands still
        before = taken
        time.sleep(0.5)
    assert taken < total / 2
    assert stub.Score(build_batch(1), timeout=WAIT_S).items[0].score.status == OK
    call.cancel()
    wait_until(
        lambda: service.read_metric("forage_reward_queue_items") == 0.0, "the items of the stream are still queued"
    )


def test_describe_lists_parameters_uses_and_the_configuration_digest(service: Service) -> None:
    stub = service.open_stub()
    whole = stub.Describe(reward_pb2.DescribeRequest(), timeout=WAIT_S)
    rewards = {reward.name: reward for reward in whole.rewards}
    parameters = {p.name: (p.type, p.default_value) for p in rewards["em"].parameters}
    assert parameters == {"score": ("float", "1.0"), "format_score": ("float", "0.0")}
    use = next(use for use in rewards["em"].uses if use.data_source == "composed")
    assert (use.component, use.weight, use.params["score"].number, use.shadow) == ("em", 2.0, 0.5, False)
    assert [(use.data_source, use.shadow) for use in rewards["subem"].uses] == [("second", False), ("composed", True)]
    assert (rewards["mine"].user, rewards["em"].user) == (True, False)
    one = stub.Describe(reward_pb2.DescribeRequest(name="f1"), timeout=WAIT_S)
    assert [reward.name for reward in one.rewards] == ["f1"]
    assert one.config_digest == whole.config_digest
    assert re.fullmatch(r"[0-9a-f]{64}", whole.config_digest)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Describe(reward_pb2.DescribeRequest(name="nothing"), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_full_queue_refuses_with_resource_exhausted_and_recovers(start: StartReward) -> None:
    service, most = start(user_timeout_s=300), MOST_IN_PROGRESS
    stub = service.open_stub()
    slow = stub.Score.future(build_batch(most, source="user", target="hang"), timeout=WAIT_S)
    wait_until(lambda: service.read_metric("forage_reward_queue_items") == most, "the slow call was not queued")
    with pytest.raises(grpc.RpcError) as caught:
        stub.Score(build_batch(1), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"{most} trajectories are queued, the limit is {most}" in caught.value.details()
    slow.cancel()
    wait_until(lambda: service.read_metric("forage_reward_queue_items") == 0.0, "the queue stays full")
    assert len(stub.Score(build_batch(100), timeout=WAIT_S).items) == 100  # an empty queue admits a batch of any size
    assert service.read_metric('forage_reward_refused_total{method="Score"}') == 1.0


def test_items_not_scored_by_the_deadline_are_timeouts_and_the_others_are_scored(service: Service) -> None:
    request = reward_pb2.ScoreRequest(items=[build_item(0), build_item(1, "hurried", "hang"), build_item(2)])
    reply = service.open_stub().Score(request, timeout=3)
    assert [scored.score.status for scored in reply.items] == [OK, TIMEOUT, OK]
    assert [scored.trajectory_id for scored in reply.items] == ["t0", "t1", "t2"]


def test_a_crash_of_user_code_affects_one_trajectory_only(service: Service) -> None:
    stub = service.open_stub()
    # The process may still be busy with the item of an earlier call that has ended.
    wait_until(lambda: score_user(stub, "number").status == OK, "the process of the user reward is not free")
    restarts = service.read_metric("forage_reward_user_restarts_total")
    for order in ("exit", "segfault", "memory", "nan"):
        reply = stub.Score(reward_pb2.ScoreRequest(items=[build_item(0, "user", order), build_item(1)]), timeout=WAIT_S)
        assert [scored.score.status for scored in reply.items] == [trajectory_pb2.STATUS_INTERNAL, OK]
        assert score_user(stub, "number").total == 3.0
    # More where the machine is so slow that a process is given up while it starts.
    assert service.read_metric("forage_reward_user_restarts_total") >= restarts + 3.0


def score_user(stub: reward_pb2_grpc.RewardStub, order: str) -> trajectory_pb2.Score:
    score: trajectory_pb2.Score = stub.Score(build_batch(1, source="user", target=order), timeout=WAIT_S).items[0].score
    return score


def test_sigterm_finishes_calls_in_flight_and_leaves_no_process(start: StartReward) -> None:
    assert_sigterm_finishes_calls(start("reward.routes.f1={name: f1}", "reward.shadow.nq=f1", user_timeout_s=4))


def test_workers_start_where_the_folder_of_temporary_files_has_a_long_path(
    start: StartReward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", make_long_folder(tmp_path))
    reply = start("reward.workers=2").open_stub().Score(build_batch(4), timeout=WAIT_S)
    assert [item.score.status for item in reply.items] == [OK] * 4


def test_a_shadow_is_in_the_metrics_and_never_in_a_reply(service: Service) -> None:
    plain, shadowed = (
        service.open_stub().Score(build_batch(20, source=source), timeout=WAIT_S) for source in ("nq", "shadowed")
    )
    assert shadowed == plain
    labels = '{data_source="shadowed"'
    wait_until(
        lambda: service.read_metric(f"forage_reward_shadow_items_total{labels}") == 20.0,
        "the shadow scored no trajectories",
    )
    assert service.read_metric(f'forage_reward_shadow_difference_bucket{labels},le="1.0"') == 0.0
    assert service.read_metric(f'forage_reward_shadow_difference_bucket{labels},le="+Inf"') == 20.0
    assert service.read_metric(f"forage_reward_shadow_disagreements_total{labels}") == 20.0
    assert service.read_metric('forage_reward_items_total{data_source="shadowed"') == 20.0


def test_a_shadow_that_cannot_keep_up_drops_and_counts_trajectories(start: StartReward) -> None:
    service = start("reward.shadow.nq=user", user_timeout_s=300)
    count = MOST_WAITING + 30
    assert len(service.open_stub().Score(build_batch(count, target="hang"), timeout=WAIT_S).items) == count
    dropped = service.read_metric("forage_reward_shadow_dropped_total")
    assert 29.0 <= dropped <= 30.0  # the shadow may be scoring one, besides those that wait


def test_a_canary_is_counted_and_logged_and_changes_no_score(service: Service) -> None:
    twice = build_item()
    twice.spans[0].text = "<answer>Rome</answer><answer>Oslo</answer>"
    reply = service.open_stub().Score(reward_pb2.ScoreRequest(items=[twice, build_item()]), timeout=WAIT_S)
    assert [scored.score.total for scored in reply.items] == [1.0, 1.0]
    assert service.read_metric('forage_reward_canaries_total{canary="many_answers",data_source="nq"}') == 1.0
    log = service.log.read_text()
    assert log.count('"event": "canary"') == 1
    assert '"canary": "many_answers", "trajectory": "t0"' in log
