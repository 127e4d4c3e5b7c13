"""The reward service as a process: its gRPC contract, health checks, start and stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from reward_process import Service
from service_ports import check_grpc_port
from waiting import WAIT_S

from forage_proto.v1 import reward_pb2, trajectory_pb2
from forage_runtime.clients.reward import RewardClient
from forage_runtime.settings import RewardSettings, Settings

ITEM = reward_pb2.ScoreItem(
    trajectory_id="run/group/0",
    data_source="world_facts",
    spans=[
        trajectory_pb2.Span(role=trajectory_pb2.ROLE_PROMPT, text="Where?\n<|im_start|>assistant\n"),
        trajectory_pb2.Span(role=trajectory_pb2.ROLE_MODEL, text="<think>t</think><search>q</search>"),
        trajectory_pb2.Span(role=trajectory_pb2.ROLE_ENV, text="<information>Oslo</information>"),
        trajectory_pb2.Span(role=trajectory_pb2.ROLE_MODEL, text="<think>t</think><answer>Oslo</answer></s>"),
    ],
    ground_truth=trajectory_pb2.GroundTruth(targets=["oslo"]),
    end_of_turn="</s>",
)


def test_a_batch_is_scored_in_order_and_an_invalid_item_affects_no_other(service: Service) -> None:
    calls = service.read_metric('forage_reward_requests_total{method="Score"}')
    labels = 'data_source="world_facts",reward="search_r1_format",status="ok"'
    scored = service.read_metric(f"forage_reward_items_total{{{labels}}}")
    unknown = reward_pb2.ScoreItem(trajectory_id="run/group/1", data_source="nowhere", spans=ITEM.spans)
    request = reward_pb2.ScoreRequest(items=[ITEM, unknown, ITEM])
    reply = service.open_stub().Score(request, timeout=WAIT_S)
    assert [item.trajectory_id for item in reply.items] == ["run/group/0", "run/group/1", "run/group/0"]
    assert [item.score.status for item in reply.items] == [
        trajectory_pb2.STATUS_OK,
        trajectory_pb2.STATUS_INVALID_INPUT,
        trajectory_pb2.STATUS_OK,
    ]
    assert reply.items[0].score.total == reply.items[0].validation_score.total == 1.0
    assert service.read_metric(f"forage_reward_items_total{{{labels}}}") == scored + 2.0
    assert service.read_metric('forage_reward_requests_total{method="Score"}') == calls + 1.0


@pytest.mark.parametrize("method", ["Score", "ScoreStream", "Describe", "Explain"])
def test_bytes_that_are_no_message_are_refused_with_a_sentence(service: Service, method: str) -> None:
    path = f"/forage.v1.Reward/{method}"

    def call(channel: grpc.Channel) -> None:
        if method == "ScoreStream":
            list(channel.stream_stream(path)(iter([b"\xff\xff"]), timeout=WAIT_S))
        else:
            channel.unary_unary(path)(b"\xff\xff", timeout=WAIT_S)

    before = len(service.log.read_text())  # of tests that share the service
    with service.channel as channel, pytest.raises(grpc.RpcError) as refused:
        call(channel)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith(f"the bytes are not a message of {path}")
    assert "Traceback" not in service.log.read_text()[before:]


def test_a_request_of_many_megabytes_is_scored(service: Service) -> None:
    item = reward_pb2.ScoreItem()
    item.CopyFrom(ITEM)
    item.spans[1].text = f"<think>{'long ' * 4_000_000}</think><search>q</search>"
    reply = service.open_stub().Score(reward_pb2.ScoreRequest(items=[item]), timeout=WAIT_S)
    assert reply.items[0].score.total == 1.0


def test_rewards_probes_and_reflection_are_served(service: Service) -> None:
    described = service.open_stub().Describe(reward_pb2.DescribeRequest(), timeout=WAIT_S)
    sources = {reward.name: [use.data_source for use in reward.uses] for reward in described.rewards}
    assert sources["search_r1_format"] == ["world_facts"]
    assert sources["math"] == []
    assert check_grpc_port(service.address, "forage.v1.Reward") == "SERVING"


def test_a_client_lists_the_data_sources_that_have_a_reward(service: Service) -> None:
    async def ask() -> frozenset[str]:
        client = RewardClient(Settings(reward=RewardSettings(grpc_address=service.address)))
        try:
            return await client.list_data_sources()
        finally:
            await client.close()

    assert asyncio.run(ask()) == {"world_facts", "nq", "composed", "second", "shadowed", "fivefold", "user", "hurried"}


def explain(service: Service, item: reward_pb2.ScoreItem, score: trajectory_pb2.Score) -> str:
    async def ask() -> str:
        client = RewardClient(Settings(reward=RewardSettings(grpc_address=service.address)))
        try:
            return await client.explain(item, score)
        finally:
            await client.close()

    return asyncio.run(ask())


def test_the_score_that_a_client_sends_is_explained_and_not_computed_again(service: Service) -> None:
    (scored,) = service.open_stub().Score(reward_pb2.ScoreRequest(items=[ITEM]), timeout=WAIT_S).items
    scored.score.components.add(name="bonus", raw=7.0, weighted=3.5)  # no reward of this service gives it
    text = explain(service, ITEM, scored.score)
    steps = [line.split("│")[2].strip() for line in text.splitlines() if line.count("│") == 4]
    assert steps[:4] == ["<think>", "t", "</think>", "<search>"]
    assert "score of search_r1_format" in text
    assert "+3.5" in text
    assert "'Oslo'" in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_an_item_without_text_of_the_model_cannot_be_explained(service: Service) -> None:
    with pytest.raises(grpc.RpcError, match="no span was written by the model"):
        explain(service, reward_pb2.ScoreItem(), trajectory_pb2.Score())


def test_a_port_in_use_is_one_sentence_and_exit_code_2(
    service: Service, start_service: Callable[..., Any], free_address: Callable[[], str]
) -> None:
    own = f"reward.health_address={free_address()}"
    second = start_service("reward", f"reward.grpc_address={service.address}", own)
    _, log = second.communicate(timeout=WAIT_S)
    assert second.returncode == 2
    assert f"cannot listen on {service.address}" in log
    assert "Traceback" not in log


def test_invalid_settings_are_one_sentence_and_exit_code_2(start_service: Callable[..., Any]) -> None:
    process = start_service("reward", "reward.routes.world_facts={name: em, params: {skore: 1}}")
    _, log = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert "params.skore does not exist" in log
    assert "Traceback" not in log
