"""The scoring queue: fairness, deadlines, admission, and the metrics of a batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from forage_proto.v1 import reward_pb2, trajectory_pb2
from forage_reward.router import RewardRouter
from forage_reward.serve.metrics import ScoreTally
from forage_reward.serve.server import ITEMS_PER_SLICE, Admission, QueueFullError, ScoringQueue
from forage_reward.serve.shadow import ShadowScorer
from forage_runtime.settings import RewardPart, RewardSettings, Settings

SOURCE = "scoring-test"


@pytest.fixture
def scoring() -> Iterator[ScoringQueue]:
    queue = ScoringQueue(RewardRouter({SOURCE: (RewardPart(name="em"),)}), ShadowScorer(Settings()), RewardSettings())
    yield queue
    queue.close()


def build_items(count: int) -> list[reward_pb2.ScoreItem]:
    return [
        reward_pb2.ScoreItem(
            trajectory_id=f"t{number}",
            data_source=SOURCE,
            spans=[trajectory_pb2.Span(role=trajectory_pb2.ROLE_MODEL, text="<answer>Oslo</answer>")],
            ground_truth=trajectory_pb2.GroundTruth(targets=["Oslo" if number % 2 else "Rome"]),
        )
        for number in range(count)
    ]


def read_metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def test_a_single_trajectory_does_not_wait_for_a_long_batch(scoring: ScoringQueue) -> None:
    ended: list[str] = []

    async def score(name: str, count: int) -> None:
        assert len(await scoring.score_batch(build_items(count), float("inf"))) == count
        ended.append(name)

    await asyncio.gather(score("first long", 3000), score("second long", 3000), score("single", 1))
    assert ended == ["single", "first long", "second long"]


async def test_a_cancelled_call_ends_its_batch_and_releases_the_queue(scoring: ScoringQueue) -> None:
    long = asyncio.create_task(scoring.score_batch(build_items(100_000), float("inf")))
    while not scoring.is_busy:
        await asyncio.sleep(0)
    long.cancel()
    with pytest.raises(asyncio.CancelledError):
        await long
    assert not scoring.is_busy
    assert len(await scoring.score_batch(build_items(2 * ITEMS_PER_SLICE), float("inf"))) == 2 * ITEMS_PER_SLICE


async def test_items_of_a_long_batch_not_scored_by_the_deadline_are_timeouts(scoring: ScoringQueue) -> None:
    first = asyncio.create_task(scoring.score_batch(build_items(20_000), float("inf")))
    await asyncio.sleep(0)
    late = await scoring.score_batch(build_items(2 * ITEMS_PER_SLICE), time.monotonic())
    assert {scored.score.status for scored in late} == {trajectory_pb2.STATUS_TIMEOUT}
    first.cancel()


async def test_admission_waits_for_room_or_refuses() -> None:
    admission = Admission(2)
    with admission.hold(2):
        with pytest.raises(QueueFullError, match="2 trajectories are queued, the limit is 2"), admission.hold(1):
            pass
        waiting = asyncio.create_task(admission.enter(1))
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting
    admission.leave(1)
    with admission.hold(100):  # an empty queue takes a batch of any size
        pass


async def test_metrics_count_every_item_of_a_batch(scoring: ScoringQueue) -> None:
    labels = {"reward": "em", "data_source": SOURCE}
    before = read_metric("forage_reward_items_total", status="ok", **labels)
    buckets = {
        le: read_metric("forage_reward_score_bucket", component="total", le=le, **labels)
        for le in ("0.0", "0.9", "1.0")
    }
    await scoring.score_batch(build_items(101), float("inf"))
    assert read_metric("forage_reward_items_total", status="ok", **labels) - before == 101
    # 51 wrong answers and 50 right ones, cumulative.
    growth = {
        le: read_metric("forage_reward_score_bucket", component="total", le=le, **labels) - was
        for le, was in buckets.items()
    }
    assert growth == {"0.0": 51, "0.9": 51, "1.0": 101}


def test_a_tally_counts_each_message_once() -> None:
    tally = ScoreTally()
    for total in (0.0, 1.0, 1.0):
        tally.add_score(SOURCE, trajectory_pb2.Score(status=trajectory_pb2.STATUS_OK, total=total, reward="tally"))
    tally.flush()
    tally.flush()
    labels = {"reward": "tally", "data_source": SOURCE, "component": "total"}
    assert read_metric("forage_reward_score_count", **labels) == 3
    assert read_metric("forage_reward_score_sum", **labels) == 2.0


async def test_no_request_makes_time_series_of_its_own_and_none_can_write_on_the_page(scoring: ScoringQueue) -> None:
    def list_series() -> set[tuple[str, ...]]:
        return {
            (sample.name, *sorted(sample.labels.values()))
            for family in text_string_to_metric_families(generate_latest().decode())
            for sample in family.samples
        }

    await scoring.score_batch([reward_pb2.ScoreItem(data_source="unknown")], float("inf"))
    before = list_series()
    hostile = ['"} 1\nforged_total 1\n', "nq\n", "\\", "x" * 100_000, *map(str, range(10_000))]
    replies = await scoring.score_batch(
        [reward_pb2.ScoreItem(data_source=name, trajectory_id=name) for name in hostile], float("inf")
    )
    assert {reply.score.status for reply in replies} == {trajectory_pb2.STATUS_INVALID_INPUT}
    assert list_series() == before
