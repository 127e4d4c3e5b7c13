"""Groups of equal rewards are replaced, and groups that come too late are dropped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from arrived_groups import arrive
from feeding_bench import PATIENCE_S, SIZE, Bench
from trainer_parts import make_group
from waiting import WAIT_S, wait_until

from forage_proto.v1.trajectory_pb2 import Status
from forage_queue.trainer import feeder
from forage_queue.trainer.batcher import BatchTimeoutError

REFILLS = ("trainer.algorithm.filter_groups=true", "trainer.max_refills=2", "trainer.max_staleness=0")


def test_a_group_of_equal_rewards_is_replaced_up_to_max_refills(
    bench: Callable[..., Bench],
) -> None:
    b = bench(*REFILLS)
    b.feeder.issue_up_to_bound(0)
    first = b.claim_prompts()
    b.reply(first[0], [0.0, 1.0])
    b.reply(first[1], [1.0, 1.0])
    b.reply(first[2], [0.0, 0.0])
    met = {prompt.position: [prompt.group_uid] for prompt in first}
    rewards = {(1, 1): [0.0, 1.0], (2, 1): [0.5, 0.5], (2, 2): [0.0, 0.0]}
    for attempt, positions in ((1, [1, 2]), (2, [2])):
        with pytest.raises(BatchTimeoutError):
            b.batcher.next_batch(1, PATIENCE_S)
        again = b.claim_prompts()
        assert [(p.position, p.attempt) for p in again] == [(position, attempt) for position in positions]
        for prompt in again:
            met[prompt.position].append(prompt.group_uid)
            b.reply(prompt, rewards[prompt.position, attempt])
    batch = b.batcher.next_batch(1, WAIT_S)
    assert [g.group_uid for g in batch.groups] == [uids[-1] for uids in met.values()]
    assert batch.metrics == {
        "dropped_stale": 0,
        "dropped_stragglers": 0,
        "refilled_groups": 3,
        "rollout_idle_s": None,  # of a first batch
    }
    assert [(d.uid, d.position, d.attempt, d.reason.partition(":")[0]) for d in batch.dropped] == [
        (met[position][attempt], position, attempt, "equal") for position, attempt in ((1, 0), (2, 0), (2, 1))
    ]
    assert len({uid.rpartition("/")[0] for uid in met[2]}) == 3, "each time another question"
    assert b.claim_prompts() == []
    assert b.streams.count_backlog(b.streams.trajectories) == SIZE


def test_a_repeatable_run_samples_a_group_with_failures_again(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 3
    monkeypatch.setattr(feeder, "MAX_REPEATS", most)
    repeatable = ("run.repeatable=true", "trainer.max_staleness=0", "rollout.weights.update=drain")
    b, other = bench(*repeatable), bench("trainer.max_staleness=0")
    b.feeder.issue_up_to_bound(0)
    first = b.claim_prompts()
    for prompt, failing in zip(first, (Status.STATUS_TIMEOUT, Status.STATUS_INTERNAL, Status.STATUS_OK), strict=True):
        b.reply(prompt, [0.0, 1.0], failing)
    with pytest.raises(BatchTimeoutError, match="positions 0, 1"):
        b.batcher.next_batch(1, PATIENCE_S)
    again = b.claim_prompts()
    assert [(p.position, p.attempt) for p in again] == [(0, 1), (1, 1)]
    assert [p.sampling.seed for p in again] == [p.sampling.seed for p in first[:2]]
    b.reply(again[0], [0.0, 1.0])
    last = again[1]
    for attempt in range(2, most + 1):
        b.reply(last, [0.0, 1.0], Status.STATUS_INTERNAL)
        with pytest.raises(BatchTimeoutError, match="positions 1"):
            b.batcher.next_batch(1, PATIENCE_S)
        [last] = b.claim_prompts()
        assert last.attempt == attempt
    b.reply(last, [0.0, 1.0], Status.STATUS_INTERNAL)
    assert [group.attempt for group in b.batcher.next_batch(1, WAIT_S).groups] == [1, most, 0]
    incomplete = make_group("q/train/0/0", [0.0, 1.0], batch=1)
    assert not b.feeder.repeat(arrive(incomplete))
    incomplete.trajectories[1].turns.add(partial_retrieval=True)
    assert b.feeder.repeat(arrive(incomplete))
    assert not other.feeder.repeat(arrive(incomplete)), "other runs train on what there is"


def test_a_restarted_trainer_issues_the_same_refills(bench: Callable[..., Bench]) -> None:
    first = bench(*REFILLS)
    first.feeder.issue_up_to_bound(0)
    prompts = first.claim_prompts()
    for prompt in prompts:
        first.reply(prompt, [1.0, 1.0])
    with pytest.raises(BatchTimeoutError):
        first.batcher.next_batch(1, PATIENCE_S)
    again = first.claim_prompts()
    # A trainer that died between the new prompt and the discard of the old group reclaims the old group.
    first.reply(prompts[0], [1.0, 1.0])
    second = bench(*REFILLS)
    second.batcher.start(0)
    with pytest.raises(BatchTimeoutError):
        second.batcher.next_batch(1, PATIENCE_S)
    assert second.claim_prompts() == [], "issued once"
    for prompt in again:
        second.reply(prompt, [0.0, 1.0])
    assert second.list_uids(1) == [prompt.group_uid for prompt in again]
    assert second.streams.count_backlog(second.streams.trajectories) == SIZE


def test_a_stale_refill_is_issued_again_under_its_own_uid(bench: Callable[..., Bench]) -> None:
    b = bench(*REFILLS)
    b.feeder.issue_up_to_bound(1)
    prompts = b.claim_prompts()
    for prompt in prompts:
        b.write(make_group(prompt.group_uid, [1.0, 1.0], 2, prompt.position, 0, version=1))
    with pytest.raises(BatchTimeoutError):
        b.batcher.next_batch(2, PATIENCE_S)
    refill = b.claim_prompts()[0]
    assert refill.min_policy_version == 1
    b.write(make_group(refill.group_uid, [0.0, 1.0], 2, 0, refill.attempt, version=0))
    with pytest.raises(BatchTimeoutError):
        b.batcher.next_batch(2, PATIENCE_S)
    [again] = b.claim_prompts()
    assert (again.group_uid, again.attempt, again.ground_truth) == (refill.group_uid, 2, refill.ground_truth)
    assert again.sampling.seed == refill.sampling.seed


DROP = "trainer.straggler_timeout_s=0.05"


@pytest.mark.parametrize("when", ["during its step", "after its step"])
def test_stragglers_are_dropped_after_the_timeout_and_discarded_when_they_arrive(
    bench: Callable[..., Bench], when: str
) -> None:
    b = bench(DROP, "trainer.max_staleness=1")
    b.feeder.issue_up_to_bound(0)
    issued = len(b.claim_prompts())
    b.answer(1, 2)
    b.answer(1, 0)
    batch = b.batcher.next_batch(1, WAIT_S)
    assert [g.position for g in batch.groups] == [0, 2]
    assert batch.stragglers == ((1, 1),)
    assert batch.metrics["dropped_stragglers"] == 1
    with b.batcher.assemble_ahead():
        if when == "during its step":
            b.answer(1, 1)
            wait_until(lambda: b.count_taken() == SIZE)
    b.batcher.mark_consumed(1)
    if when == "after its step":
        b.answer(1, 1)
    for position in range(SIZE):
        b.answer(2, position, version=1)
    assert b.list_uids(2) == [f"q/2/{p}" for p in range(SIZE)]
    b.batcher.forget([], 0)  # a checkpoint of an earlier step became durable
    assert b.streams.count_backlog(b.streams.trajectories) == 2 * SIZE, "a crash would repeat the step with all of it"
    b.acknowledge(batch)
    assert b.streams.count_backlog(b.streams.trajectories) == SIZE, "the late group is gone, batch 2 is there"
    assert (issued, b.claim_prompts()) == (2 * SIZE, []), "it is issued in no batch again"


def test_a_batch_without_any_group_is_not_trained_on(bench: Callable[..., Bench]) -> None:
    b = bench(DROP)
    with pytest.raises(BatchTimeoutError, match="3 of 3 groups"):
        b.batcher.next_batch(1, 0.2)
