"""Feeder and batcher on a real server: bounds, duplicates, stale groups, restarts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from feeding_bench import PATIENCE_S, SIZE, Bench
from waiting import WAIT_S, wait_until

from forage_queue.streams.client import StreamClient
from forage_queue.trainer.batcher import WAIT_SECONDS, BatchTimeoutError, Receiver
from forage_queue.trainer.feeder import sampling_seed
from forage_runtime.errors import SettingsError, UnavailableError
from forage_runtime.retries import RedisRetry
from forage_runtime.settings import RedisSettings, load_settings
from forage_runtime.stop import Stop, Stopped
from forage_runtime.telemetry.health import Health


@pytest.mark.parametrize(("staleness", "first"), [(0, 1), (1, 2), (3, 4)])
def test_at_most_max_staleness_plus_one_batches_are_outstanding(
    bench: Callable[..., Bench], staleness: int, first: int
) -> None:
    b = bench(f"trainer.max_staleness={staleness}")
    assert list(b.feeder.issue_up_to_bound(0)) == list(range(1, first + 1))
    assert list(b.feeder.issue_up_to_bound(1)) == [first + 1]
    assert list(b.feeder.issue_up_to_bound(1)) == []
    prompts = b.claim_prompts()
    assert [(p.batch, p.position) for p in prompts] == [(n, i) for n in range(1, first + 2) for i in range(SIZE)]
    assert {p.batch: p.min_policy_version for p in prompts} == {
        n: max(0, n - 1 - staleness) for n in range(1, first + 2)
    }


def test_nothing_is_issued_beyond_the_last_step(bench: Callable[..., Bench]) -> None:
    b = bench("trainer.max_staleness=3")
    for version in range(5):
        b.feeder.issue_up_to_bound(version)
    assert max(p.batch for p in b.claim_prompts()) == 5


def test_a_restarted_trainer_issues_no_prompt_twice(bench: Callable[..., Bench]) -> None:
    first, second = bench(), bench()
    first.feeder.issue_up_to_bound(2)
    before = len(first.claim_prompts())
    assert list(second.feeder.issue_up_to_bound(2)) == [3, 4]
    assert second.claim_prompts() == []
    assert before == 2 * SIZE


def test_prompts_of_different_positions_have_different_seeds() -> None:
    seeds = {sampling_seed(r, b, p, n) for r in range(3) for b in range(20) for p in range(10) for n in range(3)}
    assert len(seeds) == 3 * 20 * 10 * 3
    assert min(seeds) > 0
    assert max(seeds) <= 2**48


def test_another_attempt_samples_the_same_and_another_question_does_not(bench: Callable[..., Bench]) -> None:
    b = bench("trainer.algorithm.filter_groups=true", "trainer.max_refills=2")
    b.feeder.issue(1, 0, attempt=0, version=0)
    b.feeder.issue_again(1, 0, attempt=1)
    b.feeder.issue_again(1, 0, attempt=2, refill=1)
    b.feeder.issue_again(1, 0, attempt=3, refill=1)
    first, again, other, other_again = b.claim_prompts()
    for one, two in ((first, again), (other, other_again)):
        assert (one.sampling, one.group_uid, one.messages) == (two.sampling, two.group_uid, two.messages)
    assert other.sampling.seed != first.sampling.seed
    assert other.group_uid != first.group_uid


def test_a_batch_is_complete_and_in_the_order_of_positions(bench: Callable[..., Bench]) -> None:
    b = bench()
    for batch, position in ((2, 1), (1, 2), (1, 0), (2, 0), (1, 1), (2, 2)):
        b.answer(batch, position)
    assert b.list_uids(1) == [f"q/1/{p}" for p in range(SIZE)]
    b.batcher.mark_consumed(1)
    assert b.list_uids(2) == [f"q/2/{p}" for p in range(SIZE)]


@pytest.mark.parametrize(("staleness", "taken"), [(0, False), (1, True)])
def test_the_next_batch_is_assembled_while_a_step_computes(
    bench: Callable[..., Bench], staleness: int, taken: bool
) -> None:
    b = bench(f"trainer.max_staleness={staleness}", "trainer.algorithm.filter_groups=true", "trainer.max_refills=1")
    b.feeder.issue_up_to_bound(0)
    prompts = {(prompt.batch, prompt.position): prompt for prompt in b.claim_prompts()}
    for position in range(SIZE):
        b.answer(1, position)
    batch = b.batcher.next_batch(1, WAIT_S)
    assert len(batch.entries) == SIZE
    with b.batcher.assemble_ahead():
        for position in range(SIZE - 1):
            b.answer(2, position, version=1 - staleness)
        if taken:
            b.reply(prompts[2, SIZE - 1], [1.0, 1.0])
            refill = wait_until(b.claim_prompts)[0]
            assert (refill.batch, refill.position) == (2, SIZE - 1), "replaced meanwhile"
            b.reply(refill, [0.0, 1.0])
            wait_until(lambda: b.count_taken() == 2 * SIZE)
        else:
            b.answer(2, SIZE - 1, version=1)
            assert not any(thread.name.startswith("ahead") for thread in threading.enumerate()), "nobody takes any"
            assert b.count_taken() == SIZE
    b.batcher.mark_consumed(1)
    assert len(b.list_uids(2)) == SIZE


def test_an_error_of_the_assembling_thread_is_raised_and_a_stop_is_not(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench("trainer.max_staleness=1")
    b.stop.request()
    claim, claims = b.batcher._arrivals.claim, []
    monkeypatch.setattr(b.batcher._arrivals, "claim", lambda *args: claims.append(args) or claim(*args))
    with b.batcher.assemble_ahead():
        wait_until(lambda: claims)
    other = bench("trainer.max_staleness=1")
    monkeypatch.setattr(other.feeder, "refill", lambda group: 1 / 0)
    other.answer(1, 0)
    with pytest.raises(ZeroDivisionError), other.batcher.assemble_ahead():
        wait_until(lambda: other.count_taken() == 1)


@pytest.mark.parametrize("why", ["the step is over", "a stop"])
def test_files_that_are_still_to_be_read_hold_up_no_step(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    b = bench("trainer.max_staleness=1")
    reading = threading.Event()

    def read_until_over(stream: str, count: int, block_s: float, is_over: Callable[[], bool]) -> list[object]:
        reading.set()
        wait_until(is_over)
        return []

    monkeypatch.setattr(b.streams, "claim_groups", read_until_over)
    if why == "a stop":
        threading.Thread(target=lambda: reading.wait(WAIT_S) and b.stop.request()).start()
        with pytest.raises(Stopped):
            b.batcher.next_batch(1, WAIT_S)
    else:
        with b.batcher.assemble_ahead():
            assert reading.wait(WAIT_S)


def test_a_second_copy_of_a_group_is_discarded(bench: Callable[..., Bench]) -> None:
    b = bench()
    for position in (0, 0, 1, 2, 1):
        b.answer(1, position)
    batch = b.batcher.next_batch(1, WAIT_S)
    b.answer(1, 0)
    b.batcher.mark_consumed(1)
    for position in range(SIZE):
        b.answer(2, position, version=1)
    assert b.list_uids(2) == [f"q/2/{p}" for p in range(SIZE)]
    b.acknowledge(batch)
    assert b.streams.count_backlog(b.streams.trajectories) == SIZE, "only batch 2 is left"


def test_a_group_beyond_the_bound_is_dropped_and_issued_again(bench: Callable[..., Bench]) -> None:
    b = bench("trainer.max_staleness=1")
    b.feeder.issue_up_to_bound(3)
    b.claim_prompts()
    for position, version in enumerate((2, 1, 3)):  # step 4 trains version 3: 2 is the oldest it takes
        b.answer(4, position, version)
    with pytest.raises(BatchTimeoutError, match=r"1 of 3 groups .*positions 1"):
        b.batcher.next_batch(4, PATIENCE_S)
    [again] = b.claim_prompts()
    assert (again.batch, again.position, again.attempt, again.min_policy_version) == (4, 1, 1, 3)
    b.answer(4, 1, version=3, attempt=1)
    batch = b.batcher.next_batch(4, WAIT_S)
    assert [g.attempt for g in batch.groups] == [0, 1, 0]
    assert batch.stale == 1
    [dropped] = batch.dropped
    assert (dropped.position, dropped.attempt, dropped.reason.partition(":")[0]) == (1, 0, "stale")
    assert b.streams.count_backlog(b.streams.trajectories) == SIZE


def test_only_the_wait_for_missing_groups_is_counted(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure_wait() -> float:
        return float(WAIT_SECONDS.collect()[0].samples[0].value)

    b, seconds = bench(), [0.0]
    receive = b.batcher._arrivals.receive

    def receive_slowly(receiver: Receiver, block_s: float) -> None:
        receive(receiver, block_s)
        seconds[0] += 7.0

    monkeypatch.setattr("forage_queue.trainer.batcher.time", SimpleNamespace(monotonic=lambda: seconds[0]))
    monkeypatch.setattr(b.batcher._arrivals, "receive", receive_slowly)
    before = measure_wait()
    with pytest.raises(BatchTimeoutError):
        b.batcher.next_batch(1, PATIENCE_S)
    assert measure_wait() - before == seconds[0] >= 7.0
    for position in range(SIZE):
        b.answer(1, position)
    b.list_uids(1)
    before = measure_wait()
    b.list_uids(1)
    assert measure_wait() == before, "all groups are there"


def test_a_restarted_trainer_reclaims_unacknowledged_groups(bench: Callable[..., Bench]) -> None:
    first = bench()
    for batch in (1, 2):
        for position in range(SIZE):
            first.answer(batch, position)
    assert first.list_uids(1)
    first.batcher.mark_consumed(1)
    second = bench()
    assert second.batcher.start(consumed=1) == SIZE
    assert second.list_uids(2) == [f"q/2/{p}" for p in range(SIZE)]
    assert second.streams.count_backlog(second.streams.trajectories) == SIZE, "copies of batch 1 are gone"


def test_groups_whose_delivery_was_lost_are_reclaimed(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forage_queue.trainer.batcher.SILENCE_S", 0.0)
    b = bench()
    for position in range(SIZE):
        b.answer(1, position)
    assert len(b.streams.claim_groups(b.streams.trajectories, 2, 0.1)) == 2  # a reply that got lost
    assert b.list_uids(1) == [f"q/1/{p}" for p in range(SIZE)]


def test_refills_without_a_filter_are_refused() -> None:
    with pytest.raises(SettingsError, match="filter_groups=true"):
        load_settings(None, ["trainer.max_refills=1"], {})


def test_a_batch_timeout_names_the_missing_positions(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.answer(1, 1)
    with pytest.raises(BatchTimeoutError, match=r"batch 1 lacks 2 of 3 groups .*positions 0, 2.*rollout service"):
        b.batcher.next_batch(1, PATIENCE_S)
    assert "batch 1: 2 of 3 groups missing" in b.health.waiting["batch"]


def test_a_stop_ends_the_wait(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.stop.request()
    with pytest.raises(Stopped):
        b.batcher.next_batch(1, 3600)


def test_a_wait_continues_while_redis_is_unavailable(
    free_address: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forage_runtime.retries._RETRY_INTERVAL_S", 0.02)
    stop, health = Stop(), Health()
    streams = StreamClient(RedisSettings(url=f"redis://{free_address()}/0"), "absent", 0.1)
    seen: list[str] = []

    def call() -> str:
        seen.append(health.waiting.get("redis", ""))
        if len(seen) < 3:
            streams.ping()
        return "back"

    with pytest.raises(UnavailableError):
        streams.ping()
    assert RedisRetry(stop, health)(call) == "back"
    assert "is it running?" in seen[-1]
    assert "redis" not in health.waiting
