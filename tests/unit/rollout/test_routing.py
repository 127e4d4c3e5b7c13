"""The replica that a group goes to."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from forage_rollout.deployments.routing import OUT_OF_SERVICE, REPLICA, AgentRouter, EngineRouter
from forage_rollout.links.affinity import LOAD_FACTOR, MIN_CAPACITY, order_replicas, rank_replicas

REPLICAS = [f"replica-{i}" for i in range(4)]
NAMES = [f"run/world/train/{i}/0" for i in range(2000)]


def test_the_ranking_does_not_depend_on_the_order_of_replicas() -> None:
    for name in NAMES[:50]:
        assert rank_replicas(name, REPLICAS) == rank_replicas(name, reversed(REPLICAS))


def test_names_are_spread_evenly() -> None:
    first = Counter(rank_replicas(name, REPLICAS)[0] for name in NAMES)
    assert set(first) == set(REPLICAS)
    assert max(first.values()) < 1.2 * len(NAMES) / len(REPLICAS)


def test_removing_a_replica_moves_only_its_own_names() -> None:
    for name in NAMES[:200]:
        whole = rank_replicas(name, REPLICAS)
        assert rank_replicas(name, REPLICAS[1:]) == [replica for replica in whole if replica != REPLICAS[0]]


def test_a_group_stays_on_one_replica_at_low_load() -> None:
    loads = dict.fromkeys(REPLICAS, 0)
    for _ in range(MIN_CAPACITY):
        loads[order_replicas("group", loads)[0]] += 1
    assert sorted(loads.values()) == [0, 0, 0, MIN_CAPACITY]


def test_no_replica_exceeds_the_load_factor() -> None:
    loads = dict.fromkeys(REPLICAS, 0)
    for name in NAMES[:64]:
        for _ in range(8):
            loads[order_replicas(name, loads)[0]] += 1
            assert max(loads.values()) <= max(MIN_CAPACITY, LOAD_FACTOR * sum(loads.values()) / len(loads) + 1)


def test_excess_load_goes_to_the_next_replica_in_the_ranking() -> None:
    order = rank_replicas("group", REPLICAS)
    loads = dict.fromkeys(REPLICAS, 10) | {order[0]: 200}
    assert order_replicas("group", loads) == [*order[1:], order[0]]


def test_without_a_name_the_least_loaded_comes_first() -> None:
    assert order_replicas("", {"a": 3, "b": 0, "c": 2}) == ["b", "c", "a"]


class IdleRouter(EngineRouter):
    """The router without a Serve around it, of replicas without requests."""

    def __init__(self) -> None:
        pass

    @property
    def replica_queue_len_cache(self) -> Any:
        return {}


async def route(chat: str, lost: str = "") -> list[str]:
    replicas: Any = [
        SimpleNamespace(
            replica_id=ReplicaID(name, DeploymentID("Engine")),
            routing_stats={OUT_OF_SERVICE: "altered"} if name == lost else {},
        )
        for name in REPLICAS
    ]
    keywords = {"chat": chat} if chat else {}
    request = PendingRequest(args=["POST"], kwargs=keywords, metadata=RequestMetadata("1", "1"))
    ranks = await IdleRouter().choose_replicas(replicas, request)
    return [replica.replica_id.unique_id for rank in ranks for replica in rank]


@pytest.mark.parametrize("chat", NAMES[:4])
async def test_the_turns_of_a_chat_prefer_its_replica_while_it_is_in_service(chat: str) -> None:
    order = rank_replicas(chat, REPLICAS)
    assert await route(chat) == order
    assert await route(chat, lost=order[0]) == [*order[1:], order[0]]
    assert await route("") == REPLICAS


class IdleAgentRouter(AgentRouter):
    """As above, of agents: the first has a request."""

    def __init__(self) -> None:
        pass

    @property
    def replica_queue_len_cache(self) -> Any:
        return {ReplicaID(REPLICAS[0], DeploymentID("Agent")): 1}


@pytest.mark.parametrize(
    ("named", "expected"),
    [(REPLICAS[2], [REPLICAS[2]]), ("gone", [*REPLICAS[1:], REPLICAS[0]]), ("", [*REPLICAS[1:], REPLICAS[0]])],
)
async def test_requests_of_a_session_go_to_its_replica_while_it_lives(named: str, expected: list[str]) -> None:
    replicas: Any = [SimpleNamespace(replica_id=ReplicaID(name, DeploymentID("Agent"))) for name in REPLICAS]
    keywords = {REPLICA: named} if named else {}
    request = PendingRequest(args=[], kwargs=keywords, metadata=RequestMetadata("1", "1"))
    ranks = await IdleAgentRouter().choose_replicas(replicas, request)
    assert [replica.replica_id.unique_id for rank in ranks for replica in rank] == expected
