"""The reward service as a process: its gRPC contract, its probes, how it starts and ends."""

from __future__ import annotations

import signal
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from forage_common.v1 import reward_pb2, reward_pb2_grpc, trajectory_pb2

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


@dataclass(frozen=True)
class Service:
    process: Any
    channel: grpc.Channel
    grpc_address: str
    health_address: str


@pytest.fixture
def service(
    start_service: Callable[..., Any], wait_until_ready: Callable[..., None], free_address: Callable[[], str]
) -> Service:
    address, health_address = free_address(), free_address()
    process = start_service("reward", f"reward.grpc_address={address}", f"reward.health_address={health_address}")
    wait_until_ready(process, health_address)
    return Service(process, grpc.insecure_channel(address), address, health_address)


def test_a_batch_is_scored_in_order_and_one_bad_item_costs_no_other(service: Service) -> None:
    unknown = reward_pb2.ScoreItem(trajectory_id="run/group/1", data_source="nowhere", spans=ITEM.spans)
    request = reward_pb2.ScoreRequest(items=[ITEM, unknown, ITEM])
    reply = reward_pb2_grpc.RewardStub(service.channel).Score(request, timeout=20)
    assert [item.trajectory_id for item in reply.items] == ["run/group/0", "run/group/1", "run/group/0"]
    assert [item.score.status for item in reply.items] == [
        trajectory_pb2.STATUS_OK,
        trajectory_pb2.STATUS_INVALID_INPUT,
        trajectory_pb2.STATUS_OK,
    ]
    assert reply.items[0].score.total == reply.items[0].validation_score.total == 1.0
    with urllib.request.urlopen(f"http://{service.health_address}/metrics", timeout=20) as page:
        text = page.read().decode()
    assert 'forage_reward_items_total{data_source="world_facts",reward="search_r1_format",status="ok"} 2.0' in text
    assert 'forage_reward_requests_total{method="Score"} 1.0' in text


def test_a_request_of_many_megabytes_is_scored(service: Service) -> None:
    item = reward_pb2.ScoreItem()
    item.CopyFrom(ITEM)
    item.spans[1].text = f"<think>{'long ' * 4_000_000}</think><search>q</search>"
    reply = reward_pb2_grpc.RewardStub(service.channel).Score(reward_pb2.ScoreRequest(items=[item]), timeout=120)
    assert reply.items[0].score.total == 1.0


def test_rewards_probes_and_reflection_are_served(service: Service) -> None:
    described = reward_pb2_grpc.RewardStub(service.channel).Describe(reward_pb2.DescribeRequest(), timeout=20)
    sources = {reward.name: [use.data_source for use in reward.uses] for reward in described.rewards}
    assert sources["search_r1_format"] == ["world_facts"]
    assert sources["em"] == []
    probe = health_pb2_grpc.HealthStub(service.channel).Check(
        health_pb2.HealthCheckRequest(service="forage.v1.Reward"), timeout=20
    )
    assert probe.status == health_pb2.HealthCheckResponse.SERVING
    assert "forage.v1.Reward" in ProtoReflectionDescriptorDatabase(service.channel).get_services()


def test_on_sigterm_it_ends_in_order(service: Service) -> None:
    reward_pb2_grpc.RewardStub(service.channel).Score(reward_pb2.ScoreRequest(items=[ITEM]), timeout=20)
    service.process.send_signal(signal.SIGTERM)
    _, log = service.process.communicate(timeout=60)
    assert service.process.returncode == 0
    assert '"event": "stopped"' in log


@pytest.mark.parametrize("taken", ["grpc_address", "health_address"])
def test_a_port_in_use_is_one_sentence_and_exit_code_2(
    service: Service,
    start_service: Callable[..., Any],
    free_address: Callable[[], str],
    taken: str,
) -> None:
    address = getattr(service, taken)
    addresses = {"grpc_address": free_address(), "health_address": free_address(), taken: address}
    second = start_service("reward", *(f"reward.{name}={value}" for name, value in addresses.items()))
    _, log = second.communicate(timeout=60)
    assert second.returncode == 2
    assert f"cannot listen on {address}" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "reward.routes.world_facts.name=exact",
            "reward 'exact', which does not exist: known are em, ",
        ),
        ("reward.routes.world_facts={name: em, params: {skore: 1}}", "params.skore does not exist"),
        ("reward.route=em", "did you mean 'routes'?"),
    ],
)
def test_wrong_settings_are_one_sentence_and_exit_code_2(
    start_service: Callable[..., Any], override: str, sentence: str
) -> None:
    process = start_service("reward", override)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 2
    assert sentence in log
    assert "Traceback" not in log
