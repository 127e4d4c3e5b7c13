"""Which replica a group goes to."""

from __future__ import annotations

from collections import Counter

from forage_rollout.deployments.affinity import LOAD_FACTOR, MIN_CAPACITY, order_replicas, rank_replicas

REPLICAS = [f"replica-{i}" for i in range(4)]
NAMES = [f"run/world/train/{i}/0" for i in range(2000)]


def test_every_caller_ranks_alike_whatever_order_it_knows_the_replicas_in() -> None:
    for name in NAMES[:50]:
        assert rank_replicas(name, REPLICAS) == rank_replicas(name, reversed(REPLICAS))


def test_names_are_spread_evenly() -> None:
    first = Counter(rank_replicas(name, REPLICAS)[0] for name in NAMES)
    assert set(first) == set(REPLICAS)
    assert max(first.values()) < 1.2 * len(NAMES) / len(REPLICAS)


def test_a_replica_that_goes_moves_only_its_own_names() -> None:
    for name in NAMES[:200]:
        whole = rank_replicas(name, REPLICAS)
        assert rank_replicas(name, REPLICAS[1:]) == [replica for replica in whole if replica != REPLICAS[0]]


def test_a_group_stays_together_while_there_is_little_to_do() -> None:
    loads = dict.fromkeys(REPLICAS, 0)
    for _ in range(MIN_CAPACITY):
        loads[order_replicas("group", loads)[0]] += 1
    assert sorted(loads.values()) == [0, 0, 0, MIN_CAPACITY]


def test_no_replica_takes_much_more_than_its_share() -> None:
    loads = dict.fromkeys(REPLICAS, 0)
    for name in NAMES[:64]:
        for _ in range(8):
            loads[order_replicas(name, loads)[0]] += 1
            assert max(loads.values()) <= max(MIN_CAPACITY, LOAD_FACTOR * sum(loads.values()) / len(loads) + 1)


def test_what_is_too_much_for_one_goes_to_the_next_that_the_name_prefers() -> None:
    order = rank_replicas("group", REPLICAS)
    loads = dict.fromkeys(REPLICAS, 10) | {order[0]: 200}
    assert order_replicas("group", loads) == [*order[1:], order[0]]


def test_without_a_name_the_least_loaded_comes_first() -> None:
    assert order_replicas("", {"a": 3, "b": 0, "c": 2}) == ["b", "c", "a"]
