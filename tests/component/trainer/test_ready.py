"""Steps that take the first groups that are there (trainer.batching=ready), over a real server."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from feeding_bench import PATIENCE_S, SIZE, Bench
from trainer_parts import make_group
from waiting import WAIT_S

from forage_cli.runs.ledger import GroupCounts, count_groups
from forage_proto.v1.trajectory_pb2 import Prompt
from forage_queue.streams.client import Entry
from forage_queue.trainer.batcher import Batch, BatchTimeoutError, UnackedSteps
from forage_queue.trainer.slots import Slot, slot_of
from forage_runtime.errors import SettingsError
from forage_runtime.retries import RedisRetry
from forage_runtime.settings import load_settings
from forage_trainer.data.tensors import select_trajectories
from forage_trajectory.codec import pack_group


class Rollout:
    """The other end of the streams: answers the prompts that a test names."""

    def __init__(self, bench: Bench) -> None:
        self._streams = bench.streams
        self.asked: dict[Slot, Entry[Prompt]] = {}

    def claim(self) -> None:
        for entry in self._streams.claim_prompts("rollout", 1000, 0.05):
            self.asked[entry.message.batch, entry.message.position] = entry

    def answer(self, *slots: Slot, version: int = 0, rewards: tuple[float, ...] = (0.0, 1.0)) -> None:
        """Answer the prompts of these slots, sampled under a version."""
        self.claim()
        for slot in slots:
            entry = self.asked.pop(slot)
            asked = entry.message
            group = make_group(asked.group_uid, list(rewards), *slot, asked.attempt, version)
            assert self._streams.finish(entry, pack_group(group))


def take(bench: Bench, number: int, timeout_s: float = WAIT_S) -> Batch:
    bench.feeder.issue_up_to_bound(number - 1)
    batch = bench.batcher.next_batch(number, timeout_s)
    bench.batcher.mark_consumed(number)
    return batch


def list_slots(batch: Batch) -> list[Slot]:
    return [slot_of(group) for group in batch.groups]


def list_positions(batch: int) -> list[Slot]:
    return [(batch, position) for position in range(SIZE)]


@pytest.fixture
def start(bench: Callable[..., Bench]) -> Callable[..., tuple[Bench, Rollout]]:
    def open_both(*overrides: str) -> tuple[Bench, Rollout]:
        b = bench("trainer.batching=ready", "trainer.max_staleness=1", *overrides)
        b.batcher.start(0)
        b.feeder.issue_up_to_bound(0)
        return b, Rollout(b)

    return open_both


def test_a_step_takes_the_first_groups_whatever_batch_they_were_issued_for(
    start: Callable[..., tuple[Bench, Rollout]],
) -> None:
    b, rollout = start()
    rollout.answer((2, 2), (1, 1), (2, 0))
    first = take(b, 1)
    assert list_slots(first) == [(1, 1), (2, 0), (2, 2)]
    assert select_trajectories(first.groups, b.settings.trainer.algorithm).positions == (0, 0, 1, 1, 2, 2)
    assert first.ends == ()
    b.feeder.issue_up_to_bound(1)
    rollout.answer((3, 0), (1, 2), (2, 1), (1, 0), version=1)
    second = take(b, 2)
    assert list_slots(second) == [(1, 2), (2, 1), (3, 0)], "the first three"
    assert second.ends == (2,)
    b.feeder.issue_up_to_bound(2)
    assert b.batcher._list_absent(3) == [(3, 1), (3, 2), (4, 0), (4, 1), (4, 2)]


def test_the_ledger_and_the_tables_of_issues_follow_batches_that_are_over(
    start: Callable[..., tuple[Bench, Rollout]],
) -> None:
    b, rollout = start("trainer.total_training_steps=2")
    pending = UnackedSteps(b.streams, RedisRetry(b.stop, b.health))
    rollout.answer((2, 2), (1, 1), (2, 0))
    issued = b.streams.read_issued()
    first = take(b, 1)
    pending.add(first, 1, ())
    b.batcher.forget(pending.acknowledge(1), 1)
    assert len(b.streams.read_issues(b.streams.trajectories, 1)) == SIZE, "two places of each are open"
    assert not b.streams._redis.hexists(b.streams.key("issued"), "1")
    assert b.streams.read_issued() == issued
    rollout.answer((1, 2), (1, 0), (2, 1))
    second = take(b, 2)
    assert second.ends == (1, 2)
    pending.add(second, 1, ())
    b.batcher.forget(pending.acknowledge(2), 2)
    assert b.streams.read_issues(b.streams.trajectories, 1) == {}
    assert b.streams.read_issued() == issued, "for the count at the end of the run"
    b.feeder.issue(1, 0, attempt=0, version=0)
    assert b.claim_prompts() == [], "nothing of a batch that is over is issued again"
    ledger = b.streams.read_ledger()
    assert {step: [*entry.group_uids] for step, entry in ledger.items()} == {
        step: [group.group_uid for group in batch.groups] for step, batch in ((1, first), (2, second))
    }
    assert count_groups(b.streams) == GroupCounts(2 * SIZE, 2 * SIZE, 0, 0)
    b.batcher.clear()
    assert b.streams.count_backlog(b.streams.trajectories) == b.streams.count_backlog(b.streams.prompts) == 0


def test_tokens_that_are_too_old_are_never_trained_on(start: Callable[..., tuple[Bench, Rollout]]) -> None:
    b, rollout = start()
    slow = (1, 0)
    rollout.answer(*list_positions(1)[1:], (2, 0))
    take(b, 1)
    b.feeder.issue_up_to_bound(1)
    rollout.answer((2, 1), (2, 2), (3, 0), version=1)
    take(b, 2)
    b.feeder.issue_up_to_bound(2)
    rollout.answer(slow, version=0)  # step 3 trains version 2, and takes version 1 at least
    rollout.answer((3, 1), (3, 2), (4, 0), version=2)
    third = take(b, 3)
    assert slow not in list_slots(third)
    rollout.claim()
    again = rollout.asked[slow].message
    assert (again.attempt, again.min_policy_version) == (1, 2), "under the version that step 3 trains"
    b.feeder.issue_up_to_bound(3)
    rollout.answer((4, 1), (4, 2), (5, 0), version=3)
    with pytest.raises(BatchTimeoutError, match=r"batch 4 lacks 1 of 3 groups .*positions 1/0"):
        take(b, 4, timeout_s=PATIENCE_S)
    rollout.answer(slow, version=2)
    fourth = take(b, 4)
    assert slow in list_slots(fourth), "step 4 is the last that may take version 2"
    assert fourth.stale == 1
    assert [(fate.position, fate.attempt) for fate in fourth.dropped] == [(0, 0)]


def test_stragglers_that_are_dropped_are_settled_and_discarded_when_they_come(
    start: Callable[..., tuple[Bench, Rollout]],
) -> None:
    b, rollout = start("trainer.straggler_timeout_s=0.05", "trainer.total_training_steps=2")
    rollout.answer((2, 1), (1, 2))
    first = take(b, 1)
    assert list_slots(first) == [(1, 2), (2, 1)]
    assert first.stragglers == ((1, 0),), "what was issued first"
    assert b.feeder.find_latest(first.stragglers) == (rollout.asked[1, 0].message.group_uid,)
    rollout.answer((1, 0), (1, 1), (2, 0), (2, 2))
    second = take(b, 2)
    assert list_slots(second) == [(1, 1), (2, 0), (2, 2)]
    assert second.ends == (1, 2)
    b.acknowledge(first)
    assert b.streams.count_backlog(b.streams.trajectories) == SIZE, "the late group went with its step"
    b.acknowledge(second)
    assert b.streams.count_backlog(b.streams.trajectories) == 0


def test_another_question_takes_the_place_of_equal_rewards(start: Callable[..., tuple[Bench, Rollout]]) -> None:
    b, rollout = start("trainer.algorithm.filter_groups=true", "trainer.max_refills=1")
    rollout.answer((2, 0), rewards=(1.0, 1.0))
    rollout.answer((1, 0), (1, 1))
    with pytest.raises(BatchTimeoutError, match="1 of 3 groups"):
        take(b, 1, timeout_s=PATIENCE_S)
    rollout.answer((2, 0))
    batch = take(b, 1)
    assert list_slots(batch) == [(1, 0), (1, 1), (2, 0)]
    assert batch.groups[2].attempt == 1
    assert [fate.reason.partition(":")[0] for fate in batch.dropped] == ["equal"]


def test_a_restart_goes_on_with_what_no_durable_step_has_taken(
    start: Callable[..., tuple[Bench, Rollout]], bench: Callable[..., Bench]
) -> None:
    b, rollout = start()
    rollout.answer((2, 2), (1, 1), (2, 0), (1, 0))
    first = take(b, 1)
    assert list_slots(first) == [(1, 1), (2, 0), (2, 2)]
    state = b.feeder.settled.state_dict()
    rollout.answer((1, 2), (2, 1))
    second = take(b, 2)
    b.acknowledge(first)  # the checkpoint of step 1 is durable, that of step 2 is not
    again = bench("trainer.batching=ready", "trainer.max_staleness=1")
    again.feeder.settled.load_state_dict(state)
    assert again.batcher.start(1) == SIZE, "the groups of step 2 are still there"
    assert [g.read_packed() for g in take(again, 2).groups] == [g.read_packed() for g in second.groups]
    rollout.claim()
    assert sorted(rollout.asked) == list_positions(3), "nothing else was issued again"


def test_a_lost_group_of_any_batch_is_issued_again(
    start: Callable[..., tuple[Bench, Rollout]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forage_queue.trainer.batcher.SILENCE_S", 0.0)
    b, rollout = start()
    rollout.answer((1, 1), (2, 1))
    b.streams._redis.delete(b.streams.prompts)  # with all that was asked for
    b.streams.create_groups()
    with pytest.raises(BatchTimeoutError):
        take(b, 1, timeout_s=PATIENCE_S)
    rollout.asked.clear()
    rollout.claim()
    assert sorted(rollout.asked) == [(1, 0), (1, 2), (2, 0), (2, 2)]
    assert {entry.message.attempt for entry in rollout.asked.values()} == {1}


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("trainer.max_staleness=0",), r"batching=ready chooses among the groups of max_staleness \+ 1 batches"),
        (("run.repeatable=true",), r"run\.repeatable needs trainer\.batching=strict, not ready"),
        (("trainer.placement=colocated",), r"placement=colocated needs trainer\.batching=strict, not ready"),
    ],
)
def test_settings_under_which_nothing_may_be_chosen_are_refused(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        load_settings(None, ["trainer.batching=ready", *overrides], {})
