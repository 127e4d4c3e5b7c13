"""How many groups a dispatcher has in flight, against simulated engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from forage_queue.rollout.concurrency import REASONS, Concurrency, EngineLoad, GroupLimit
from forage_rollout.metrics import Counts, RolloutCollector, Snapshot
from forage_runtime.settings import RolloutSettings

SLOTS = 64


@dataclass
class SimulatedEngine:
    """An engine whose cache has room for some groups, and whose batch for others; more are evicted, or wait."""

    cache_groups: int
    batch_groups: int
    evictions: int = 0
    works: bool = True

    def run(self, groups: int) -> EngineLoad:
        running = min(groups, self.batch_groups)
        self.evictions += max(0, running - self.cache_groups)
        used = min(1.0, running / self.cache_groups)
        waiting = (groups - running) * SLOTS // self.batch_groups
        return EngineLoad(waiting=waiting, evictions=self.evictions, cache_used=used, works=self.works)


@dataclass
class Simulation:
    """A dispatcher that always has prompts, in whose engines groups take some looks to end."""

    engines: list[SimulatedEngine]
    limit: GroupLimit
    lasting: int = 3
    ends: list[int] = field(default_factory=list)
    history: list[int] = field(default_factory=list)

    def run(self, looks: int) -> list[int]:
        """The groups in flight at each look."""
        for _ in range(looks):
            now = len(self.history)
            self.ends = [end for end in self.ends if end > now]
            begun = max(0, self.limit.groups - len(self.ends))
            self.ends += [now + 1 + (number + now) % (2 * self.lasting) for number in range(begun)]
            share = len(self.ends) // len(self.engines)
            loads = {str(number): engine.run(share) for number, engine in enumerate(self.engines)}
            self.history.append(len(self.ends))
            self.limit.look(loads, len(self.ends), is_full=True)
        return self.history[-looks:]


def simulate(*engines: SimulatedEngine, ceiling: int = 1000, first: int = 4) -> Simulation:
    return Simulation(list(engines), GroupLimit(ceiling, first, SLOTS))


@pytest.mark.parametrize("engines", [1, 4])
def test_the_batches_are_filled_within_seconds_and_a_short_queue_is_kept(engines: int) -> None:
    made = simulate(*(SimulatedEngine(10_000, 100) for _ in range(engines)))
    made.run(12)
    assert all(100 * engines <= groups <= 2 * 112 * engines for groups in made.run(20))
    assert made.limit.reason == "queue"
    assert made.limit.lowered == 0


def test_where_the_cache_is_smaller_than_the_batch_few_sequences_are_evicted() -> None:
    made = simulate(SimulatedEngine(100, 1000))
    made.run(60)
    before = made.engines[0].evictions
    used = made.run(200)
    lost = (made.engines[0].evictions - before) / sum(used)
    assert lost < 0.01
    assert 60 < sum(used) / len(used) <= 100
    assert made.limit.lowered > 0


def test_a_limit_follows_engines_that_join_and_that_lose_their_cache() -> None:
    made = simulate(SimulatedEngine(100, 1000))
    made.run(100)
    made.engines.append(SimulatedEngine(100, 1000))
    assert max(made.run(100)) > 140
    for engine in made.engines:
        engine.cache_groups = 20
    made.run(60)
    assert max(made.run(40)) < 60


def test_evictions_of_groups_that_began_before_a_cut_lower_the_limit_once() -> None:
    limit = GroupLimit(1000, 100, SLOTS)
    limit.look({"one": EngineLoad(evictions=0)}, 100, is_full=True)
    for evictions in range(1, 20):
        limit.look({"one": EngineLoad(evictions=evictions)}, 160, is_full=True)
    assert (limit.groups, limit.lowered, limit.reason) == (120, 1, "rest"), "200 were allowed, 160 ran"


def test_the_limit_is_at_least_one_group_and_at_most_the_ceiling() -> None:
    starved = simulate(SimulatedEngine(0 + 1, 1), first=0)
    starved.engines[0].cache_groups = 1
    for evictions in range(100):
        starved.limit.look({"one": EngineLoad(evictions=evictions)}, 1, is_full=True)
        assert starved.limit.groups >= 1
    wide = simulate(SimulatedEngine(10_000, 10_000), ceiling=37)
    assert max(wide.run(50)) == 37
    assert wide.limit.reason == "ceiling"


def test_without_prompts_or_engines_the_limit_stays() -> None:
    limit = GroupLimit(1000, 8, SLOTS)
    limit.look({"one": EngineLoad()}, 3, is_full=False)
    assert (limit.groups, limit.reason) == (8, "prompts")
    for loads in ({}, {"one": EngineLoad(works=False)}):
        limit.look(loads, 8, is_full=True)
        assert (limit.groups, limit.reason) == (8, "engines")
    limit.look({"one": EngineLoad(cache_used=0.95)}, 8, is_full=True)
    assert (limit.groups, limit.reason) == (8, "cache")


def test_an_engine_that_is_started_again_has_evicted_nothing() -> None:
    limit = GroupLimit(1000, 8, SLOTS)
    limit.look({"one": EngineLoad(evictions=500)}, 8, is_full=False)
    limit.look({"two": EngineLoad(evictions=3)}, 8, is_full=False)
    limit.look({"two": EngineLoad(evictions=3)}, 8, is_full=False)
    assert limit.lowered == 0


def test_loads_are_read_from_the_counts_that_engines_report() -> None:
    counts: Counts = {
        ("requests_waiting",): 3,
        ("evictions",): 2,
        ("cache_tokens",): 1000,
        ("cache_tokens_used",): 250,
        ("loop_looks", "Engine"): 9,
    }
    assert EngineLoad.from_counts(counts) == EngineLoad(3, 2, 0.25)
    for name in ("paused", "asleep", "out_of_service"):
        assert not EngineLoad.from_counts({**counts, (name,): 1}).works


def test_it_begins_with_as_many_groups_as_the_engines_run_at_once() -> None:
    rollout = RolloutSettings.model_validate({"n": 8, "engine_replicas": {"min": 2, "max": 2}})

    async def ask() -> Mapping[str, Counts]:
        return {}

    assert Concurrency(rollout, ask, lambda: None).limit.groups == 2 * 128 // 8
    assert Concurrency(rollout, None, lambda: None).limit.groups == 256


def test_every_reason_is_a_metric() -> None:
    collector = RolloutCollector()
    counts = {("groups_limit_reason", reason): 1.0 for reason in REASONS} | {("groups_limit",): 12.0}
    collector.update({"Dispatcher": [Snapshot("one", counts), Snapshot("two", counts)]}, None, None)
    assert collector.get("groups_limit") == 24
    assert collector.get("groups_limit_reason", "evictions") == 2
